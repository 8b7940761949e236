"""accelerate: a step of its optimizer is one unless gradients are being accumulated.

Iterations are those of `_rounds`.  A step that its gradient scaler skips for an overflow counts, since its work was
done.  DeepSpeed under accelerate steps in its engine, which has a hook of its own.
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
    """Hook the steps of accelerate's optimizers: of ``accelerate.optimizer``."""
    optimizer = getattr(module, "AcceleratedOptimizer", None)
    if optimizer is None or not around(optimizer, "step", _GUARD, before=_before, after=_after):
        raise Unknown("accelerate.optimizer has no AcceleratedOptimizer.step")


def attach_accelerator(module: ModuleType) -> None:
    """Hook the last backward pass of an iteration, in which gradients are summed: of ``accelerate.accelerator``.

    Raises:
        Unknown: there is no ``Accelerator.backward``.
    """
    accelerator = getattr(module, "Accelerator", None)
    if accelerator is None or not around(accelerator, "backward", _SYNC_GUARD, before=_backward):
        raise Unknown("accelerate.accelerator has no Accelerator.backward: the own time of ranks is not measured")


def _backward(call: Call) -> None:
    if call.args[0].sync_gradients:  # else they are accumulated without communication
        get_metrics_collector().sync_point()


def _before(call: Call) -> Any:
    """Return the optimizer where it will step; claim before torch's own hook sees it."""
    accelerated = call.args[0]
    if not accelerated.gradient_state.sync_gradients:
        return None
    _ROUNDS.claim(accelerated.optimizer)
    return accelerated.optimizer


def _after(optimizer: Any, call: Call, result: Any) -> None:
    if optimizer is not None:
        _ROUNDS.stepped(optimizer)
