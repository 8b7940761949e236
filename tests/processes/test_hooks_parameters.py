"""Numbers of parameters, compared with numbers counted by hand, of models that are wrapped, sharded or packed."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from cases import cases

torch = pytest.importorskip("torch", reason="needs PyTorch")

from effllm.hooks._parameters import (  # noqa: E402
    convention_of,
    each_parameter,
    flops_per_token,
    model_name,
    model_of,
    parameters_of,
    unwrapped,
    vocabulary_size_of,
)

pytestmark = pytest.mark.torch


class Tiny(torch.nn.Module):
    """An embedding of 10 x 4, two layers of 4 x 4, and a head of 4 x 10, which can be tied to the embedding."""

    def __init__(self, tied=False, **config):
        super().__init__()
        self.table = torch.nn.Embedding(10, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head = torch.nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.table.weight
        usual = {"num_hidden_layers": 2, "hidden_size": 4, "tie_word_embeddings": tied}
        self.config = SimpleNamespace(**usual, **config)

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.head


def counted(model):
    found = parameters_of(model)
    return found.total, found.trainable


def flops(model, length=None):
    return flops_per_token(model, parameters_of(model), length)


def test_tied_embeddings_are_counted_once():
    model = Tiny(tied=True)
    assert flops(model)[0] == 6 * 72, "once, as the head"
    model.layers[0].requires_grad_(False)

    assert counted(Tiny()) == (40 + 32 + 40, 112)
    assert counted(model) == (40 + 32, 40 + 16)
    assert ("layers.0.weight", 16, False) in list(each_parameter(model))


def test_parameters_of_compiled_and_wrapped_models_are_found():
    model = Tiny()
    compiled = torch.compile(model, backend="eager")
    inside = torch.nn.Module()
    inside.module = model

    assert counted(compiled) == counted(inside) == (112, 112)
    assert unwrapped(compiled) is model
    assert unwrapped(inside) is model


def test_empty_tensor_of_zero_3_is_counted_with_its_full_size():
    model = Tiny()
    for parameter in model.parameters():
        parameter.ds_numel = parameter.numel()
        parameter.data = torch.empty(0)

    assert counted(model) == (112, 112)


class Params4bit(torch.nn.Parameter):
    """A parameter as in bitsandbytes: two weights per byte, and an attribute with the full shape."""

    bnb_quantized = True


@cases("storage", [torch.uint8, torch.bfloat16])
@cases("has_shape", [True, False])
def test_every_packed_four_bit_weight_is_counted(storage, has_shape):
    """16 weights of 4 bits need 8 bytes in every storage format."""
    layer = torch.nn.Linear(4, 4, bias=False)
    packed = torch.zeros(8, dtype=torch.uint8).view(storage)[:, None]
    layer.weight = Params4bit(packed, requires_grad=False)
    layer.weight.quant_state = SimpleNamespace(shape=torch.Size([4, 4])) if has_shape else None

    assert counted(layer) == (16, 0)


def test_active_parameters_include_only_chosen_experts():
    """Four experts of 16 parameters, two experts per token: 32 of 64 parameters are active."""
    model = Tiny(num_local_experts=4, num_experts_per_tok=2)
    model.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(4))
    inside = torch.nn.Module()
    inside.mlp, inside.config = model, model.config

    found = parameters_of(inside)
    assert (found.total, found.active) == (112 + 64, 112 + 32)
    assert found.share_of_rank(counts_them=False) == {"total": 0, "trainable": 0, "active": 0}


def test_token_flops_exclude_embeddings_and_frozen_gradients():
    """6 FLOPs for each of 32 + 40 weights (4 without a gradient); attention: 12 x 2 layers x width 4 x length 8."""
    model = Tiny()
    attention = 12 * 2 * 4 * 8
    assert flops(model, 8) == (6 * 72 + attention, 2 * 72 + attention / 3)
    assert flops(model) == (6 * 72, 2 * 72)

    model.layers.requires_grad_(False)
    assert flops(model, 8)[0] == 6 * 40 + 4 * 32 + attention
    assert flops(torch.nn.Linear(4, 4), 8) is None, "unknown without a config"


class Gpt(torch.nn.Module):
    """A language model in the manner of GPT-2: other names, and a head that is tied without a config of it."""

    def __init__(self, config=None, tied=True):
        super().__init__()
        self.table, self.places = torch.nn.Embedding(10, 4), torch.nn.Embedding(8, 4)
        self.layer, self.head = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.table.weight
        if config is not None:
            self.args = config


@cases("config", [SimpleNamespace(n_layer=2, n_embd=4), {"n_layers": 2, "dim": 4, "n_vocab": 10}])
def test_flops_follow_from_usual_names_of_layers_and_width(config):
    model = Gpt(config)

    assert flops(model, 8)[0] == 6 * (16 + 40) + 12 * 2 * 4 * 8
    assert "12 x layers" in convention_of(model)


@cases("tied", [True, False])
def test_flops_of_a_language_model_without_a_config_are_those_of_its_weights(tied):
    model = Gpt(tied=tied)

    assert flops(model, 8)[0] == 6 * (16 + 40)
    assert convention_of(model).endswith("left out, because the model has no config with layers and width")


def test_vocabulary_is_known_of_language_models_alone():
    classifier = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 4))
    table = torch.nn.Sequential(*(torch.nn.Embedding(10, 4) for _ in range(5)), torch.nn.Linear(20, 10))

    assert (vocabulary_size_of(Gpt()), vocabulary_size_of(Tiny(vocab_size=10))) == (10, 10)
    assert [vocabulary_size_of(one) for one in (classifier, table, torch.nn.Linear(4, 10))] == [None] * 3


def test_model_of_an_optimizer_is_the_innermost_module_with_its_parameters():
    model, teacher = Gpt(), Gpt()
    both = torch.nn.ModuleList([torch.nn.Sequential(model), teacher])

    assert model_of(list(model.parameters())) is model
    assert model_of(list(model.layer.parameters())) is model.layer
    assert model_of([*model.parameters(), *teacher.parameters()]) is both
    assert model_of([torch.nn.Parameter(torch.ones(2))]) is None


SHARDED = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from effllm.hooks._parameters import each_parameter, parameters_of, unwrapped

dist.init_process_group("gloo")

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
        self.head = torch.nn.Linear(3, 11, bias=False)
    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

# a table of 33, two layers of 9 + 3, a head of 33: nothing of it can be halved
for how in ("1", "1 whole", "2"):
    model = Tiny()
    if how != "1 whole":
        model.table.requires_grad_(False)
    if how == "2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), use_orig_params=how == "1",
            device_id=torch.device("cpu"))
    model(torch.zeros(2, 2, dtype=torch.long)).sum().backward()
    found = parameters_of(model)
    names = sorted(name.rsplit(".", 1)[-1] for name, *_ in each_parameter(model))
    print(how, found.total, found.trainable, len(names), type(unwrapped(model)).__name__, flush=True)
dist.barrier()
sys.stdout.flush()
os._exit(0)  # on a busy machine torch's own threads end with "terminate called without an active exception"
"""


@pytest.mark.long
def test_every_rank_counts_the_whole_model_with_fsdp(tmp_path):
    """Two processes use FSDP1 with original parameters, FSDP1 with flat parameters, and FSDP2."""
    script = tmp_path / "script.py"
    script.write_text(SHARDED)
    options = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", "2", "--log_dir", str(tmp_path)]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *options, "--redirects", "3", str(script)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, "".join(path.read_text() for path in tmp_path.rglob("stderr.log"))
    outputs = [path.read_text().splitlines() for path in tmp_path.rglob("stdout.log")]
    assert len(outputs) == 2
    for lines in outputs:
        assert lines[0] == "1 90 57 6 Tiny"
        assert lines[1] == "1 whole 90 90 6 Tiny"
        assert lines[2].startswith("2 90 57 6")


class Strange:
    """A config that cannot be read."""

    def __getattr__(self, name):
        raise KeyError(name)


@cases(
    ("loaded_from", "name"),
    [
        ("meta-llama/Llama-2-7b", "meta-llama/Llama-2-7b"),
        ("/home/alice/models/tiny/", "tiny"),
        ("../out/checkpoint-500", "checkpoint-500"),
        ("", "Tiny"),
        (None, "Tiny"),
    ],
)
def test_model_name_is_its_loaded_name_without_folders(loaded_from, name):
    assert model_name(Tiny(_name_or_path=loaded_from)) == name
    assert model_name(SimpleNamespace(module=Tiny(_name_or_path=loaded_from))) == name
    assert model_name(SimpleNamespace(config=Strange())) == "SimpleNamespace"
