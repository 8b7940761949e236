"""The estimates of ``effllm fit`` against trainings with transformers and PEFT, whose tensors are counted here."""

import pytest

from benchmarks.memory.built import measure
from benchmarks.memory.configurations import Configuration
from benchmarks.memory.judged import judge

SMALL = (2, 64, 4, 2, 176, 512, 2, 64)
# Precision, optimizer, checkpointing, rank of LoRA, accumulation, attention.
TRAININGS = [
    ("llama", "fp32", "adamw", "none", 0, 1, "sdpa"),
    ("llama", "bf16", "lion", "full", 0, 1, "eager"),
    ("mistral", "bf16-mixed", "sgd-momentum", "none", 4, 2, "sdpa"),
    ("qwen3", "bf16-mixed", "adafactor", "full", 0, 2, "eager"),
    ("gpt2", "fp32", "muon", "none", 0, 1, "eager"),
    ("mixtral", "bf16", "adamw", "none", 0, 1, "sdpa"),
]


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: "-".join(map(str, training)))
def test_counted_training_agrees_with_the_estimate(training):
    architecture, *rest = training
    configuration = Configuration(architecture, *SMALL, *rest)

    found = judge(configuration, vars(measure(configuration)))

    assert found.exact
    assert found.ratio == pytest.approx(1, abs=0.12)
