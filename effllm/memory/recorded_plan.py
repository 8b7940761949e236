"""The plan of a run from the facts in its run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from effllm.memory.plan import MemoryPlan

#: Settings that determine the memory of every training; a plan without one of them is not known.
NEEDED = ("precision", "optimizer", "checkpointing", "seq_length", "micro_batch")
#: The facts of a run with words of a plan; a later fact replaces words of an earlier one.
FACTS = ("framework_plan", "memory_plan")
_SETTINGS = {one.name: str(one.type) for one in fields(MemoryPlan) if one.name != "mode"}
#: Setting of a plan -> fact of Megatron's training loop.
_MEGATRON = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "dp": "data_parallel",
    "seq_length": "sequence_length",
    "micro_batch": "micro_batch_size",
}


class UnknownPlan(ValueError):
    """The facts of a run do not give its plan, with the reason."""


def recorded_plan(facts: Mapping[str, Any], positions: float | None = None) -> MemoryPlan:
    """Return the plan of a run.

    It is the fact ``framework_plan`` of the framework's hook, with the changes of ``memory_plan``, a fact of the
    training script; or the facts of Megatron's training loop.

    Args:
        facts: the facts of the run.
        positions: positions of the largest micro-batch; the length follows from it if no fact states the length.

    Raises:
        UnknownPlan: a setting that determines the memory is missing or wrong.
    """
    stated = [text for name in FACTS if isinstance(text := facts.get(name), str)]
    if any(stated):
        return _stated(" ".join(stated), positions)
    if facts.get("framework") == "megatron" and facts.get("optimizer"):
        return _of_megatron(facts)
    raise UnknownPlan("no known plan")


def _stated(text: str, positions: float | None) -> MemoryPlan:
    settings: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        kind = _SETTINGS.get(name)
        if kind is None:
            raise UnknownPlan("a wrong memory_plan")
        settings[name] = _read(kind, value)
    if positions and settings.get("micro_batch"):
        settings.setdefault("seq_length", math.ceil(positions / settings["micro_batch"]))
    return _complete(settings)


def _read(kind: str, value: str) -> Any:
    if kind == "str":
        return value
    if kind == "bool" and value in ("true", "false"):
        return value == "true"
    if kind == "int" and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    raise UnknownPlan("a wrong memory_plan")


def _of_megatron(facts: Mapping[str, Any]) -> MemoryPlan:
    settings: dict[str, Any] = {}
    for name, fact in _MEGATRON.items():
        value = facts.get(fact)
        if type(value) is int:
            settings[name] = value
    if facts.get("virtual_pipeline"):
        raise UnknownPlan("a virtual pipeline")
    recomputed, precision = facts.get("recomputation") or "none", facts.get("precision")
    settings["implementation"] = "megatron"
    settings["checkpointing"] = recomputed if recomputed in ("none", "full") else "selective"
    settings["precision"] = {"bf16": "bf16-master", "fp16": "bf16-master", "fp32": "fp32"}.get(str(precision))
    settings["optimizer"] = {"adam": "adamw", "sgd": "sgd-momentum"}.get(str(facts["optimizer"]))
    settings["zero"] = 1 if facts.get("distributed_optimizer") else 0
    settings["sequence_parallel"] = bool(facts.get("sequence_parallel")) and settings.get("tp", 1) > 1
    whole = facts.get("global_batch_size")
    once = settings.get("micro_batch", 0) * settings.get("dp", 1)
    if type(whole) is int and once > 0:
        settings["accumulation"] = max(whole // once, 1)
    return _complete(settings)


def _complete(settings: dict[str, Any]) -> MemoryPlan:
    missing = [name for name in NEEDED if settings.get(name) is None]
    if missing:
        raise UnknownPlan(f"no {missing[0]} of the plan")
    return MemoryPlan(**settings)
