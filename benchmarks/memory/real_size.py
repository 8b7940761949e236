"""Models of the table at their real size, with a training for one GPU: forty, drawn with a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.memory.judged import plan_of
from effllm.memory.config_json import KnownModel, find_model
from effllm.memory.estimate import estimate
from effllm.memory.plan import MemoryPlan, ModelShape

#: From 0.1 to 8 thousand million parameters; of the architectures, two were never counted on the CPU.
MODELS = (
    "smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "pythia-1b", "tinyllama-1.1b", "llama-3.2-1b", "opt-1.3b", "gpt2-xl",
    "gemma-2b", "gemma-2-2b", "llama-3.2-3b", "phi-3-mini", "qwen3-4b", "mistral-7b", "olmo-2-7b", "llama-3.1-8b",
)  # fmt: skip
TOKENS = ((1, 512), (4, 512), (1, 2048), (2, 1024), (8, 256), (2, 2048))  # micro-batch, length
#: Share of the GPU that a training may need at most, by the high limit of its estimate.
MAX_SHARE = 0.97


@dataclass(frozen=True)
class RealSize:
    """A model of the table with its training."""

    model: str
    micro_batch: int
    seq_length: int
    precision: str
    optimizer: str
    checkpointing: str
    lora_rank: int
    accumulation: int
    attention: str
    lora_targets: str = "all"
    base_bits: int = 0

    @property
    def _known(self) -> KnownModel:
        known = find_model(self.model)
        assert known is not None
        return known

    @property
    def architecture(self) -> str:
        return str(self._known.config["model_type"])

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config.json."""
        dropouts = {
            "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
            "opt": {"dropout": 0.0},
        }.get(self.architecture, {})
        return {**self._known.config, **dropouts, "pad_token_id": 0, "use_cache": False}

    @property
    def vocab(self) -> int:
        return int(self._known.config["vocab_size"])

    @property
    def shape(self) -> ModelShape:
        return self._known.shape

    @property
    def plan(self) -> MemoryPlan:
        return plan_of(self)


def real_sizes(count: int, usable_bytes: float, seed: int = 15) -> list[RealSize]:
    """Return different trainings that fit on a GPU by the high limit of their estimate; the models take turns."""
    draw = random.Random(seed)
    found: dict[RealSize, None] = {}
    at = 0
    while len(found) < count:
        model = MODELS[at % len(MODELS)]
        is_llama = model.startswith(("llama", "mistral", "qwen", "smollm", "tinyllama"))
        one = RealSize(
            model,
            *draw.choice(TOKENS),
            precision=draw.choice(("fp32", "bf16", "bf16-mixed")),
            optimizer=draw.choice(("adamw", "adamw", "sgd", "sgd-momentum", "adafactor", "lion")),
            checkpointing=draw.choice(("none", "none", "full")),
            lora_rank=draw.choice((0, 0, 8, 16)) if is_llama else 0,
            accumulation=draw.choice((1, 1, 2)),
            attention=draw.choice(("sdpa", "sdpa", "eager")),
        )
        if model == "gpt2-xl" and one.seq_length > 1024:
            continue  # it has 1,024 positions
        if estimate(one.shape, one.plan).total.high <= MAX_SHARE * usable_bytes:
            found[one] = None
            at += 1
        elif not one.lora_rank and draw.random() < 0.1:
            at += 1  # a model that does not fit without adapters
    return list(found)
