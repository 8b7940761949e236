"""The plan of a run from the facts in its run folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from effllm.memory.plan import MemoryPlan

#: Settings that determine the memory of every training; a plan without one of them is not known.
NEEDED = ("precision", "optimizer", "checkpointing", "seq_length", "micro_batch")
#: Names of the values of a run: the peak of torch's allocator in steps, and the largest micro-batch.
STEPS_PEAK, STEPS_POSITIONS = "allocator/steps_peak_bytes", "allocator/steps_positions"
#: The facts of a run with words of a plan; a later fact replaces words of an earlier one.
FACTS = ("framework_plan", "memory_plan")
_SETTINGS = {one.name: str(one.type) for one in fields(MemoryPlan) if one.name != "mode"}
_WORD = re.compile(rf"(?:{'|'.join(_SETTINGS)})=[a-z0-9-]{{1,20}}")


class UnknownPlan(ValueError):
    """The facts of a run do not give its plan, with the reason."""


def recorded_plan(facts: Mapping[str, Any], positions: float | None = None) -> MemoryPlan:
    """Return the plan of a run.

    It is the fact ``framework_plan`` of the framework's hook, with the changes of ``memory_plan``, a fact of the
    training script.

    Args:
        facts: the facts of the run.
        positions: positions of the largest micro-batch; the length follows from it if no fact states the length.

    Raises:
        UnknownPlan: a setting that determines the memory is missing or wrong.
    """
    stated = _words(facts)
    if not stated:
        raise UnknownPlan("no known plan")
    settings: dict[str, Any] = {}
    for word in stated:
        name, _, value = word.partition("=")
        kind = _SETTINGS.get(name)
        if kind is None:
            raise UnknownPlan("a wrong memory_plan")
        settings[name] = _read(kind, value)
    if positions and settings.get("micro_batch"):
        settings.setdefault("seq_length", math.ceil(positions / settings["micro_batch"]))
    missing = [name for name in NEEDED if name not in settings]
    if missing:
        raise UnknownPlan(f"no {missing[0]} of the plan")
    return MemoryPlan(**settings)


def plan_line(facts: Mapping[str, Any]) -> str | None:
    """Return the words of the plan of a run for a line of a ledger: no other text; ``None`` without words."""
    last = {word.partition("=")[0]: word for word in _words(facts) if _WORD.fullmatch(word)}
    return " ".join(last.values()) or None


def _words(facts: Mapping[str, Any]) -> list[str]:
    return [word for name in FACTS if isinstance(text := facts.get(name), str) for word in text.split()]


def _read(kind: str, value: str) -> Any:
    if kind == "str":
        return value
    if kind == "bool" and value in ("true", "false"):
        return value == "true"
    if kind == "int" and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    raise UnknownPlan("a wrong memory_plan")
