"""Measure a training step with fake tensors: the model of transformers, without a GPU and without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from effllm.config.isolated import NoAnswer, ask
from effllm.memory.config_fields import architecture_of
from effllm.memory.estimate import MeasuredStep
from effllm.memory.plan import MemoryPlan

DEADLINE_S = 900.0  # an operation takes 0.2 ms without a device; a model of 80 layers has a million of them in a step
_ONE_RANK: dict[str, Any] = dict.fromkeys(("tp", "pp", "cp", "ep"), 1)
_OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")  # Adafactor of torch reads values, which fake tensors do not have
_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed")


class CannotMeasure(ValueError):
    """A plan or a model of which no step can be measured, with the reason."""


def measure(config: Mapping[str, Any] | None, plan: MemoryPlan) -> MeasuredStep:
    """Return the bytes of a training step of one rank, before ZeRO divides its tensors.

    `effllm.memory.measure_child` builds the model, with the adapters of PEFT, and trains it.

    Raises:
        CannotMeasure: the plan needs another trainer, a package is missing, or the model does not run.
    """
    _check(config, plan)
    assert config is not None
    try:
        found = ask("effllm.memory.measure_child", "measure", {"config": config, "plan": asdict(plan)}, DEADLINE_S)
    except NoAnswer as error:
        raise CannotMeasure(f"--measure: {error}") from None
    return MeasuredStep(**{**found, "notes": tuple(found["notes"])})


def _check(config: Mapping[str, Any] | None, plan: MemoryPlan) -> None:
    if config is None or not (architecture_of(config) or config.get("model_type")):
        raise CannotMeasure("--measure needs a config of Hugging Face with architectures or a model_type")
    if plan != replace(plan, fused_loss=False, base_keeps_inputs=False, implementation="transformers", **_ONE_RANK):
        raise CannotMeasure(
            "--measure is for one rank with the kernels of transformers: no TP, PP, CP, EP, fused loss or kept inputs"
        )
    if plan.checkpointing == "selective":
        raise CannotMeasure("--measure has the checkpointing none and full")
    if plan.optimizer not in _OPTIMIZERS or plan.precision not in _PRECISIONS:
        raise CannotMeasure(f"--measure has the optimizers {', '.join(_OPTIMIZERS)} and {', '.join(_PRECISIONS)}")
