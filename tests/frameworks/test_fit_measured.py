"""Steps measured with fake tensors, against steps of the same models with real tensors."""

import json
from dataclasses import asdict

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.integrations import moe
from typer.testing import CliRunner

from benchmarks.memory import built
from benchmarks.memory.built import measure as count
from benchmarks.memory.configurations import Configuration
from benchmarks.memory.judged import shape_and_plan
from effllm.commands.app import app
from effllm.commands.fit import CannotMeasure, measure
from effllm.config.isolated import NoAnswer
from effllm.memory.estimate import ACTIVATION_LIMITS
from effllm.memory.measure_child import QuantizedLinear, Storages, measured_step, quantize
from effllm.memory.model_count import build_model
from effllm.memory.plan import MemoryPlan

# transformers warns of its own old names, and PEFT of the names of modules.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

SMALL = (2, 64, 4, 2, 176, 512, 2, 64)
JAMBA = {
    "architectures": ["JambaForCausalLM"], "model_type": "jamba", "num_hidden_layers": 4, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512, "num_experts": 4,
    "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
}  # fmt: skip


@pytest.fixture
def fake_step(monkeypatch):
    """Return a function that measures in this process, and leaves transformers as it was."""

    def step(fields, **settings):
        with monkeypatch.context() as changed:
            changed.setattr(moe, "_grouped_mm", moe._grouped_mm)
            changed.setattr(masking_utils, "find_packed_sequence_indices", masking_utils.find_packed_sequence_indices)
            return measured_step({"config": fields, "plan": asdict(MemoryPlan(**settings))})

    return step


@pytest.mark.parametrize(
    "training",
    [
        ("llama", "bf16", "adamw", "none", 8, 1, "sdpa"),
        ("qwen3", "bf16", "sgd-momentum", "full", 8, 2, "eager"),
        ("gpt2", "bf16-mixed", "sgd", "none", 0, 2, "eager"),
        ("mixtral", "fp32", "adamw", "none", 0, 1, "sdpa"),
        ("deepseek_v3", "bf16-mixed", "sgd", "full", 0, 1, "sdpa"),
        ("llama", "bf16", "adamw", "none", 8, 1, "sdpa", "qv", 4),
        ("llama", "bf16-mixed", "adamw", "none", 8, 1, "sdpa", "all", 4),
    ],
    ids=lambda training: "-".join(map(str, training)),
)
def test_step_with_fake_tensors_has_the_bytes_of_the_counted_one(training, fake_step, monkeypatch):
    if 4 in training[7:]:
        pytest.importorskip("bitsandbytes")
        monkeypatch.setattr(built, "_quantize", quantize_short_weights)
        # On a CPU, too, PEFT asks for the autocast of CUDA.
        is_enabled = torch.is_autocast_enabled
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *names: is_enabled(*(names or ("cpu",))))
    architecture, *rest = training
    configuration = Configuration(architecture, *SMALL, *rest)
    _, plan = shape_and_plan(configuration)

    found = fake_step({**configuration.fields, "model_type": architecture}, **asdict(plan))

    counted = count(configuration)
    names = ("weights", "gradients", "optimizer_states")
    assert [found[name] for name in names] == [counted.weights, counted.gradients, counted.states]
    # The product in the place of experts in 32 bits has the gradient of one expert once more.
    assert counted.peak == pytest.approx(found["peak"], rel=0.015 if architecture == "deepseek_v3" else 0.001)


def quantize_short_weights(model, computed, quantize_weights=built._quantize):
    """Quantize as transformers does it: it loads weights in 16 bits, which is then the precision of their copies."""
    scales = quantize_weights(model, computed)
    for module in model.modules():
        if hasattr(getattr(module, "weight", None), "quant_state"):
            module.weight.quant_state.dtype = computed
    return scales


def bytes_of_a_product(product, inputs, *weights):
    """Return the bytes that live after the forward pass without its inputs, and the peaks of forward and of both."""
    inputs = inputs.clone().requires_grad_()
    storages = Storages()
    known = storages.numbers_of((inputs, *weights))
    with storages:
        outputs = product(inputs * 2)
        end = len(storages.log)
        outputs.backward(torch.ones_like(outputs))
    kept = set()
    for number in storages.log[:end]:
        kept ^= {abs(number)}
    peaks = [storages.size(storages.live_at_peak(at, without=known)) for at in (end, len(storages.log))]
    return storages.size(kept - known), *peaks


@pytest.mark.parametrize("bits", [4, 8])
def test_stand_in_has_the_memory_of_the_module_of_bitsandbytes(bits):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    linear = torch.nn.Linear(128, 256, dtype=torch.bfloat16)
    # With few tokens, the copy of the matrix is larger than the outputs, with many the outputs.
    inputs = 0.1 * torch.randn(2, 512 if bits == 4 else 32, 128, dtype=torch.bfloat16)
    if bits == 4:
        weight = bitsandbytes.nn.Params4bit(
            linear.weight.detach(), requires_grad=False, compress_statistics=False, quant_type="nf4"
        )
        real = bitsandbytes.nn.Linear4bit(128, 256, compute_dtype=torch.bfloat16)
        real.weight = weight.to("cpu")
        scales = real.weight.quant_state.absmax
        product = lambda one: real(one).clone()  # noqa: E731 - as the adapters of PEFT do it
    else:
        real = bitsandbytes.nn.Linear8bitLt(128, 256, has_fp16_weights=False, threshold=6.0)
        real.load_state_dict(linear.state_dict())
        real = real.to("cpu")
        real.init_8bit_state()
        scales, matrix = real.state.SCB, real.state.CB
        function = bitsandbytes.autograd._functions.MatMul8bitLt  # that of a GPU
        real.weight.data = matrix
        product = lambda one: function.apply(one, real.weight, None, real.bias, real.state)  # noqa: E731
    real.bias.data = real.bias.data.bfloat16()
    real.requires_grad_(False)
    stand_in = QuantizedLinear(linear.to("meta"), bits, torch.bfloat16).to_empty(device="cpu")

    held = (real.weight, scales, real.bias)
    assert sum(one.nbytes for one in stand_in.parameters()) == sum(one.nbytes for one in held)
    kept, forward, both = bytes_of_a_product(stand_in, inputs, *stand_in.parameters())
    expected = bytes_of_a_product(product, inputs, *held)
    assert (kept, both) == (expected[0], expected[2])
    if bits == 4:  # on the CPU, products of whole numbers are one operation
        assert forward == expected[1]


def test_quantized_matrices_are_those_of_transformers(monkeypatch):
    bnb = pytest.importorskip("transformers.integrations.bitsandbytes")
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    for fields in (Configuration("gpt2", *SMALL, *TRAINED).fields, Configuration("mixtral", *SMALL, *TRAINED).fields):
        for skipped in (None, ["c_proj", "self_attn"]):
            ours, theirs = build_model(fields), build_model(fields)
            left_out = transformers.quantizers.base.HfQuantizer.get_modules_to_not_convert(theirs, skipped, None)
            bnb.replace_with_bnb_linear(theirs, left_out, config)
            expected = [name for name, one in theirs.named_modules() if type(one).__name__ == "Linear4bit"]

            quantize(ours, 4, torch.bfloat16, skipped)

            found = [name for name, one in ours.named_modules() if isinstance(one, QuantizedLinear)]
            assert found == expected and found and "lm_head" not in found[:-1]


TRAINED = ("bf16", "sgd", "none", 0, 1, "sdpa")


def fit(tmp_path, fields, *arguments):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    settings = ("--mode", "training", "--precision", "bf16", "--seq-length", "64", "--measure", "--json")
    return CliRunner().invoke(app, ["fit", str(tmp_path / "config.json"), *settings, *arguments])


def test_measured_step_of_layers_without_formulas_makes_the_total_known(tmp_path):
    done = fit(tmp_path, JAMBA, "--gpu", "t4", "--optimizer", "sgd")

    [model] = json.loads(done.stdout)["models"]
    parts, measured_step = model["training"]["parts"], model["measured"]
    assert (done.exit_code, model["has_known_layers"], model["training"]["verdict"]) == (0, False, "fits")
    assert measured_step["weights"] == parts["weights"]["expected"]
    sizes = [limit * measured_step["activations"] for limit in (0, 1, ACTIVATION_LIMITS[1])]
    assert [parts["activations"][name] for name in ("low", "expected", "high")] == pytest.approx(sizes, abs=1)
    assert any("without the kernels of mamba_ssm" in note for note in model["notes"])


def test_measured_step_of_a_quantized_hybrid_has_experts_that_are_not_quantized(tmp_path):
    skipped = {"quantization_config": {"llm_int8_skip_modules": [".*mamba", "lm_head"]}}

    done = fit(tmp_path, {**JAMBA, **skipped}, "--lora", "4", "--base-bits", "4")

    [model] = json.loads(done.stdout)["models"]
    experts = 2 * 4 * 3 * 64 * 96  # layers 1 and 3 have four experts of three matrices
    assert model["training"]["parts"]["weights"]["expected"] == model["measured"]["weights"] > 2 * experts


def test_image_text_model_is_measured_with_text_alone(tmp_path):
    text = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "vocab_size": 512,
    }  # fmt: skip
    vision = {"depth": 2, "hidden_size": 64, "embed_dim": 32, "num_heads": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)

    done = fit(tmp_path, {**config.to_dict(), "architectures": ["Qwen2VLForConditionalGeneration"]})

    [model] = json.loads(done.stdout)["models"]
    assert any("text alone" in note for note in model["notes"])
    assert model["measured"]["activations"] > 0


def test_model_that_cannot_run_is_refused_with_the_reason_and_a_remedy(fake_step):
    with pytest.raises(NoAnswer, match="no loss of labels"):
        fake_step({**JAMBA, "architectures": ["JambaModel"]}, precision="bf16", seq_length=64)
    with pytest.raises(NoAnswer, match="llm_int8_skip_modules"):
        fake_step(JAMBA, precision="bf16", seq_length=64, lora_rank=4, base_bits=4)
    with pytest.raises(CannotMeasure, match="has no model of the model_type newest"):
        measure({"model_type": "newest"}, MemoryPlan(precision="bf16"))
