"""Train forty models of real size, drawn with a seed, on one GPU, and compare the peaks with ``effllm fit``.

The peaks are those of the second step: torch's own counters are reset after the first one, which makes the optimizer's
states.  The memory in use on the GPU, less what torch has reserved, is the CUDA context and everything else.
"""

from __future__ import annotations

import gc
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figure import Figure
from benchmarks.machine import machine
from benchmarks.memory.judged import plan_of
from effllm.memory.config_json import KnownModel, find_model
from effllm.memory.estimate import ByteRange, estimate
from effllm.memory.plan import MemoryPlan, ModelShape

COUNT = 40
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


@dataclass
class MeasuredPeaks:
    """The bytes of a training on a GPU; ``failure`` instead if it could not be measured."""

    training: RealSize
    allocated: float | None = None
    reserved: float | None = None
    beside: float | None = None  # in use on the GPU, but not reserved by torch
    failure: str = ""

    @property
    def intervals(self) -> dict[str, tuple[float | None, ByteRange]]:
        """Measured bytes and their estimate, by name."""
        found = estimate(self.training.shape, self.training.plan)
        context = found.part("CUDA context").bytes
        total = None if self.reserved is None or self.beside is None else self.reserved + self.beside
        return {
            "allocated": (self.allocated, found.allocated),
            "reserved": (self.reserved, found.reserved),
            "beside torch": (self.beside, context),
            "total": (total, found.total),
        }


def why_not() -> str:
    """Return the reason why nothing can be measured here, or an empty string."""
    try:
        import peft
        import torch
        import transformers
    except ImportError as error:
        return f"{error.name} is not installed"
    del peft, transformers
    return "" if torch.cuda.is_available() else "torch finds no GPU"


def measure_all(count: int = COUNT) -> list[MeasuredPeaks]:
    """Train as many models, one after the other."""
    import torch

    found = []
    usable = torch.cuda.get_device_properties(0).total_memory
    for at, one in enumerate(real_sizes(count, usable)):
        if sys.stderr.isatty():
            print(f"{at + 1} of {count}: {one.model:<20}", end="\r", file=sys.stderr)
        found.append(measure(one))
    return found


def measure(one: RealSize, device: str = "cuda") -> MeasuredPeaks:
    """Return the peaks of the second step of a training; on the CPU, torch has no peaks."""
    import torch

    from benchmarks.memory.built import build

    try:
        built = build(one, device)
        built.optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        built.step()
        if device != "cuda":
            return MeasuredPeaks(one, failure="not on a GPU")
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        beside = whole - free - torch.cuda.memory_reserved()
        return MeasuredPeaks(one, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), beside)
    except RuntimeError as error:  # also torch.cuda.OutOfMemoryError
        return MeasuredPeaks(one, failure=str(error).splitlines()[0])
    finally:
        built = None  # type: ignore[assignment]
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def figures_of(found: Sequence[MeasuredPeaks]) -> list[Figure]:
    """Return the share of peaks inside their intervals, and the median error, by kind of memory."""
    figures = []
    for name in ("allocated", "reserved", "beside torch", "total"):
        pairs = [one.intervals[name] for one in found if not one.failure]
        known = [(value, wanted) for value, wanted in pairs if value is not None]
        inside = sum(wanted.low <= value <= wanted.high for value, wanted in known)
        errors = [abs(wanted.expected / value - 1) for value, wanted in known if value]
        detail = {"inside": inside, "trainings": len(known), "failed": sum(bool(one.failure) for one in found)}
        share = inside / len(known) if known else None
        figures.append(Figure(f"memory, {name}: inside the 90 % interval", share, "ratio", detail=detail))
        error = median(errors) if errors else None
        figures.append(Figure(f"memory, {name}: median error", error, "ratio"))
    return figures


def rows_of(found: Sequence[MeasuredPeaks]) -> list[dict[str, Any]]:
    """Return each training with its bytes and intervals."""
    return [
        {
            "training": asdict(one.training),
            **({"failure": one.failure} if one.failure else {}),
            **{
                name: {"measured": value, "low": wanted.low, "expected": wanted.expected, "high": wanted.high}
                for name, (value, wanted) in one.intervals.items()
            },
        }
        for one in found
    ]


def main(folder: Path, *, keep: bool) -> int:
    """Measure, and print each training; return 2 without a GPU."""
    if reason := why_not():
        print(f"benchmarks.memory: no memory of a GPU can be measured here: {reason}", file=sys.stderr)
        return 2
    import torch

    name = torch.cuda.get_device_name(0)
    found = measure_all()
    for one in found:
        value, wanted = one.intervals["allocated"]
        shown = one.failure or f"{(value or 0) / 1e9:.2f} GB"
        limits = f"{wanted.expected / 1e9:.2f} ({wanted.low / 1e9:.2f}-{wanted.high / 1e9:.2f})"
        print(f"{one.training.model:<16} {one.training.precision:<10} allocated {shown}, estimate {limits}")
    for figure in figures_of(found):
        print(f"{figure.name}: {'not measured' if figure.value is None else f'{figure.value:.3f}'}")
    if keep:
        about = machine(gpu=name, torch=torch.__version__)
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        path = folder / f"{about['date']}-memory-gpu-{slug}.json"
        body = {"machine": about, "figures": [one.to_dict() for one in figures_of(found)], "rows": rows_of(found)}
        path.write_text(json.dumps(body, indent=1) + "\n")
        print(f"kept in {path}")
    return 0
