"""accelerate: a step of its optimizer is one where it does not hold gradients back to accumulate them.

What is an iteration then is told in `_rounds`.  A step that its gradient scaler skips for an overflow is one, for it
was worked for.  DeepSpeed under accelerate steps in its engine, which is not seen.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from effllm import ownership
from effllm.hooks import Unknown
from effllm.hooks._rounds import Rounds
from effllm.hooks._wrap import Call, Guard, around

_ROUNDS = Rounds(ownership.ACCELERATE, "accelerate")
_GUARD = Guard("accelerate")


def attach(module: ModuleType) -> None:
    """Hook the steps of accelerate's optimizers: of ``accelerate.optimizer``."""
    optimizer = getattr(module, "AcceleratedOptimizer", None)
    if optimizer is None or not around(optimizer, "step", _GUARD, before=_before, after=_after):
        raise Unknown("accelerate.optimizer has no AcceleratedOptimizer.step")


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
