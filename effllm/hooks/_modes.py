"""Evaluations of a loop that is measured only by its optimizer: from the model's ``eval()`` to its ``train()``.

``torch.nn.Module.train`` (``eval`` calls it) is wrapped on the class when such a loop begins.  Modules get no
additional attributes, and compiled calls are passed through.  When a period in eval mode ends, it counts as an
evaluation under three conditions: no optimizer stepped in the period, no phase or generation was marked in it, and the
last iteration had no such period.  Because of the last condition, rollouts in every iteration do not count as
evaluations.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Iterable
from typing import Any

from effllm.hooks._steps import Steps
from effllm.hooks._wrap import Guard
from effllm.trainer.collector import get_metrics_collector

MAX_MODULES = 64  # maximal number of remembered modules; a loop sets only a few modules to eval mode

_GUARD = Guard("evaluation by the model's eval()")
_listeners: list[EvalMode] = []


class EvalMode:
    """Finds the evaluations between the steps of one loop.

    Args:
        steps: the loop's steps.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._trained: frozenset[int] = frozenset()  # ids of the trained parameters
        # module id -> module, and whether the module has all trained parameters
        self._known: dict[int, tuple[weakref.ref[Any], bool]] = {}
        self._since_ns = 0  # start of the eval mode; 0 while the model is not in eval mode
        self._waited_ns = 0  # data wait while the model is in eval mode
        self._marks: tuple[int, ...] = ()
        self._is_in_this = False
        self._was_in_last = True  # whether the last iteration had a period in eval mode; True before the first

    def follow(self, parameters: Iterable[Any]) -> None:
        """Set the trained parameters; a module with all these parameters is a model."""
        self._trained = frozenset(id(one) for one in parameters if one.requires_grad)
        self._known.clear()
        self._since_ns = 0
        if self not in _listeners:
            _listeners.append(self)
        _wrap(sys.modules["torch"])

    def changed(self, module: Any, is_training: bool) -> None:
        if is_training != bool(self._since_ns) or not self._steps.is_owner or not self._owns(module):
            return
        now_ns = time.monotonic_ns()
        if not is_training:
            self._since_ns, self._waited_ns, self._marks = now_ns, 0, _marks()
            if not self._was_in_last:
                self._steps.may_evaluate()
            return
        self._is_in_this = True
        if not self._was_in_last and self._marks == _marks():
            self._steps.evaluated(self._since_ns, now_ns)
            self._since_ns = 0  # waits inside the evaluation are no data waits
        self._drop()

    def stepped(self, is_end: bool) -> None:
        """Drop a possible evaluation at an optimizer's step: the model is being trained in eval mode."""
        self._drop()
        if is_end:
            self._was_in_last, self._is_in_this = self._is_in_this, False

    def waited(self, spent_ns: int) -> bool:
        """Keep a data wait that is inside a possible evaluation; return whether it is inside."""
        if self._since_ns:
            self._waited_ns += spent_ns
        return bool(self._since_ns)

    def _drop(self) -> None:
        if self._since_ns:
            self._since_ns = 0
            self._steps.waited(self._waited_ns)  # these waits belong to the iteration

    def _owns(self, module: Any) -> bool:
        known = self._known.get(id(module))
        if known is None or known[0]() is not module:
            if len(self._known) >= MAX_MODULES:
                self._known.clear()
            owns = self._trained <= {id(one) for one in module.parameters()}
            known = self._known[id(module)] = weakref.ref(module), owns
        return known[1]


def _marks() -> tuple[int, ...]:
    """Return values that change when a phase or a generation begins or ends, or when new metrics begin."""
    recorder = get_metrics_collector().recorder
    return (id(recorder), *recorder.marks) if recorder is not None else ()


def _changed(module: Any, is_training: bool) -> None:
    for listener in _listeners:
        listener.changed(module, is_training)


@functools.lru_cache(maxsize=1)
def _wrap(torch: Any) -> None:
    """Wrap ``torch.nn.Module.train``; nested calls, for submodules, are passed through."""
    kind = torch.nn.Module
    train = kind.train
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)
    is_inside = False

    @functools.wraps(train)
    def seen(self: Any, mode: bool = True) -> Any:
        nonlocal is_inside
        if is_inside or is_compiling():  # compiled code must not depend on effllm
            return train(self, mode)
        _GUARD(_changed, self, mode)
        is_inside = True
        try:
            return train(self, mode)
        finally:
            is_inside = False

    kind.train = seen
