"""The estimates of ``effllm fit`` against trainings with transformers and PEFT, whose tensors are counted here."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.memory.built import build, measure
from benchmarks.memory.configurations import Configuration
from benchmarks.memory.judged import judge
from benchmarks.memory.on_gpu import RealSize
from benchmarks.memory.on_gpu import measure as measure_peaks
from effllm.commands.app import app
from effllm.memory.states import count_parameters

# transformers warns of its own old names, and PEFT of the names of modules.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

SMALL = (2, 64, 4, 2, 176, 512, 2, 64)
# Precision, optimizer, checkpointing, rank of LoRA, accumulation, attention.
TRAININGS = [
    ("mistral", "bf16-mixed", "sgd-momentum", "none", 4, 2, "sdpa"),
    ("qwen3", "bf16-mixed", "adafactor", "full", 0, 2, "eager"),
    ("gpt2", "fp32", "muon", "none", 0, 1, "eager"),
    ("mistral-window", "bf16-mixed", "sgd", "none", 0, 1, "sdpa"),
    ("deepseek_v3", "bf16", "sgd", "full", 0, 1, "sdpa"),
    ("llama", "bf16", "adamw-8bit", "none", 0, 1, "sdpa"),
    ("llama", "bf16", "adamw", "none", 8, 1, "sdpa", "qv", 4),
]


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: "-".join(map(str, training)))
def test_counted_training_agrees_with_the_estimate(training):
    architecture, *rest = training
    if "adamw-8bit" in rest or 4 in rest[7:]:
        pytest.importorskip("bitsandbytes")
    configuration = Configuration(architecture, *SMALL, *rest)

    found = judge(configuration, vars(measure(configuration)))

    assert found.exact
    assert found.ratio == pytest.approx(1, abs=0.12)


def test_measured_step_is_within_10_percent_of_the_estimate(tmp_path):
    path = tmp_path / "config.json"
    fields = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    path.write_text(json.dumps({**fields, "num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 512}))
    options = ["--mode", "training", "--precision", "fp32", "--seq-length", "128", "--measure", "--json"]

    done = CliRunner().invoke(app, ["fit", str(path), *options])

    [model] = json.loads(done.stdout)["models"]
    parts = model["training"]["parts"]
    assert model["measured"]["weights"] == parts["weights"]["expected"]
    names = ("weights", "gradients", "optimizer_states", "activations", "logits")
    estimated = sum(parts[name]["expected"] for name in names)
    assert model["measured"]["peak"] == pytest.approx(estimated, rel=0.1)


def test_model_of_real_size_trains_as_on_a_gpu():
    smallest = RealSize("smollm2-135m", 1, 16, "bf16", "adamw", "full", 8, 1, "sdpa")

    built = build(smallest)
    measured = measure_peaks(smallest, "cpu")

    weights = sum(one.numel() for name, one in built.model.named_parameters() if "lora" not in name)
    assert weights == count_parameters(smallest.shape).total
    assert measured.failure == "not on a GPU"  # after a whole step
