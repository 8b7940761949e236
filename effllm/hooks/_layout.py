"""The facts ``precision`` and ``parallel_layout``, which have the same values in all frameworks."""

from __future__ import annotations

from typing import Any

#: What a rank of data parallelism has: the whole model (SINGLE: there is only one rank), or with FSDP and ZERO a part.
SINGLE, DDP, FSDP, ZERO = "single", "DDP", "FSDP", "ZeRO"
_PRECISIONS = {
    "32": "fp32", "32-true": "fp32", "float32": "fp32",
    "16-true": "fp16", "16-mixed": "fp16", "float16": "fp16",
    "bf16-true": "bf16", "bf16-mixed": "bf16", "bfloat16": "bf16",
    "transformer-engine": "fp8", "transformer-engine-float16": "fp8",
}  # fmt: skip
_STRATEGIES = {
    "SingleDeviceStrategy": SINGLE, "DDPStrategy": DDP, "FSDPStrategy": FSDP, "DeepSpeedStrategy": ZERO,
}  # fmt: skip


def precision_of(name: Any) -> str:
    """Return the precision of matrix products, such as ``bf16``, from the name of a framework or a type of torch."""
    text = str(name).removeprefix("torch.")
    return _PRECISIONS.get(text, text)


def strategy_facts(strategy: Any) -> dict[str, str]:
    """Return the layout of a strategy of Lightning; its name if it is another one."""
    name = type(strategy).__name__
    return {"parallel_layout": _STRATEGIES.get(name, name)}


def zero_facts(engine: Any) -> dict[str, Any]:
    """Return the layout of an engine of DeepSpeed; ``zero_stage`` is 0 without ZeRO."""
    stage = engine.zero_optimization_stage()
    without = DDP if getattr(engine, "dp_world_size", 1) > 1 else SINGLE
    return {"parallel_layout": ZERO if stage else without, "zero_stage": stage}
