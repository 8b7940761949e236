"""accelerate: each step of its optimizer is measured, except steps that only accumulate gradients.

`_rounds` defines the iterations.  A step that the gradient scaler skips after an overflow counts too, because its work
was done.  With DeepSpeed, accelerate calls DeepSpeed's engine, which has its own hook.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._rounds import Rounds
from effllm.hooks._wrap import Call, Guard, around
from effllm.trainer import ownership
from effllm.trainer.collector import get_metrics_collector

_ROUNDS = Rounds(ownership.ACCELERATE, "accelerate")
_GUARD = Guard("accelerate")
_SYNC_GUARD = Guard("accelerate's own time of ranks")


def attach(module: ModuleType) -> None:
    """Hook the steps of accelerate's optimizers, in ``accelerate.optimizer``."""
    optimizer = getattr(module, "AcceleratedOptimizer", None)
    if optimizer is None or not around(optimizer, "step", _GUARD, before=_before, after=_after):
        raise Unknown("accelerate.optimizer has no AcceleratedOptimizer.step")


def attach_accelerator(module: ModuleType) -> None:
    """Hook the last backward pass of an iteration, which sums gradients, in ``accelerate.accelerator``.

    Raises:
        Unknown: the module has no ``Accelerator.backward``.
    """
    accelerator = getattr(module, "Accelerator", None)
    if accelerator is None or not around(accelerator, "backward", _SYNC_GUARD, before=_backward):
        raise Unknown("accelerate.accelerator has no Accelerator.backward: the own time of ranks is not measured")


def _backward(call: Call) -> None:
    if call.args[0].sync_gradients:  # False: gradients are accumulated without communication
        get_metrics_collector().sync_point()


def _before(call: Call) -> Any:
    """Return the optimizer if it will step; become the owner before torch's own hook runs."""
    accelerated = call.args[0]
    if not accelerated.gradient_state.sync_gradients:
        return None
    _ROUNDS.claim(accelerated.optimizer)
    return accelerated.optimizer


def _after(optimizer: Any, call: Call, result: Any) -> None:
    if optimizer is not None:
        _ROUNDS.stepped(optimizer)
