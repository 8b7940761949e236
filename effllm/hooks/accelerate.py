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

_ROUNDS = Rounds(ownership.ACCELERATE, "accelerate")
_GUARD = Guard("accelerate")


def attach(module: ModuleType) -> None:
    optimizer = getattr(module, "AcceleratedOptimizer", None)
    if optimizer is None or not around(optimizer, "step", _GUARD, before=_claim_step, after=_process_step):
        raise Unknown("accelerate.optimizer has no AcceleratedOptimizer.step")


def _claim_step(call: Call) -> Any:
    """Return the optimizer if it will step; become the owner before torch's own hook runs."""
    accelerated = call.args[0]
    if not accelerated.gradient_state.sync_gradients:
        return None
    _ROUNDS.claim(accelerated.optimizer)
    return accelerated.optimizer


def _process_step(optimizer: Any, call: Call, result: Any) -> None:
    if optimizer is not None:
        _ROUNDS.process_step(optimizer)
