"""The iterations of a loop that is measured only by the steps of its optimizers.

An iteration is the time from the end of one step to the end of the next step, without the data wait, which is the
time of torch's DataLoader for the batches.  An iteration includes waits for batches from other sources (run.json
records this), and evaluations that neither `_modes` nor `effllm.phase` marks (the summary records this).  The first
step starts the metrics and is not measured, because the start of its iteration is unknown.

Several optimizers share one iteration.  The optimizer that steps first in a process is the leader, and its step ends
the iteration.  Later steps of other optimizers are part of the next iteration, so sums of counts and times are
right, but shifted by less than an iteration.  A new optimizer with the leader's parameters becomes the leader at its
first step.  If the leader was deleted, the next optimizer that steps becomes the leader.  If other optimizers make more
than 16 steps without a step of the leader, the last of these optimizers becomes the leader; all these steps are one
iteration.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from effllm.hooks._modes import EvalMode
from effllm.hooks._parameters import size_of
from effllm.hooks._steps import Steps, listen_to_waits, rank
from effllm.hooks._wrap import no_metrics
from effllm.trainer import ownership
from effllm.trainer.collector import get_metrics_collector

MIN_STEPS = 3  # with fewer steps, an optimizer of plain tensors does not count as training
PATIENCE_STEPS = 16  # the leader is replaced if other optimizers make more steps than this while it makes none


class Rounds:
    """The iterations of a loop, from the steps of its optimizers.

    Args:
        level: a level of `ownership`.
        name: the system's name in run.json.
    """

    def __init__(self, level: int, name: str) -> None:
        self._level, self._name = level, name
        self._steps = Steps(level, name)
        self._modes = EvalMode(self._steps)
        self._leader: Any = None  # a weak reference
        self._leaders_parameters: frozenset[int] = frozenset()
        self._steps_of_others = 0
        self._plain_steps = 0  # number of steps on plain tensors; counted up to MIN_STEPS
        self._joined: weakref.WeakSet[Any] = weakref.WeakSet()
        self._counted: set[int] = set()  # ids of parameters, because two optimizers may share parameters
        self._share = {"total": 0, "trainable": 0}
        self._watches_cells = False
        self._between_cells: Any = None  # the recorder that was running when a notebook cell ended
        listen_to_waits(self)

    def claim(self, optimizer: Any) -> bool:
        """Return whether these steps are counted; the first counted step starts the metrics."""
        if self._steps.is_owner:
            return True
        if not self._steps.claim():
            return False
        if not _trains_a_model(optimizer):
            ownership.release(self._level, self._name)
            if self._plain_steps < MIN_STEPS and any(one.grad is not None for one in _parameters(optimizer)):
                self._plain_steps += 1
                if self._plain_steps == MIN_STEPS:
                    no_metrics("the optimizer updates plain tensors, which are not the parameters of a model")
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        collector = get_metrics_collector()
        declares_parameters = self._steps.may_declare_parameters
        self._leader, self._counted, self._joined = None, set(), weakref.WeakSet()
        self._share = {"total": 0, "trainable": 0}
        facts = {
            "iteration_start": "the end of the previous optimizer step; the time of torch's DataLoader is excluded",
            **({"parameters_from": "optimizer"} if declares_parameters else {}),
        }
        # An earlier call of the loop may have set the number of the first iteration; without such a call, 1 is assumed.
        first = None if collector.is_collecting else 1
        declared = {"iterations_not_measured": 1, "evaluation_in_iterations": True}
        if self._steps.begin(first_iteration=first, facts=facts, is_numbered=first is None, declared=declared):
            self._watch_cells()

    def _watch_cells(self) -> None:
        """Exclude the time between the cells of a notebook from an iteration that continues in the next cell."""
        find = getattr(sys.modules.get("IPython"), "get_ipython", None)
        shell = find() if find is not None else None
        if shell is not None and not self._watches_cells:
            self._watches_cells = True
            shell.events.register("post_run_cell", self._cell_ended)
            shell.events.register("pre_run_cell", self._cell_begins)

    def _cell_ended(self, *_: Any) -> None:
        self._between_cells = get_metrics_collector().recorder
        self._steps.phase_start("other")

    def _cell_begins(self, *_: Any) -> None:
        recorder, self._between_cells = self._between_cells, None
        if recorder is not None and recorder is get_metrics_collector().recorder:
            self._steps.phase_end()

    def stepped(self, optimizer: Any) -> None:
        """Process an optimizer's step; a step of the leader ends the iteration."""
        if not self.claim(optimizer):
            return
        recorder = get_metrics_collector().recorder
        if recorder is None:
            return
        leader = self._leader() if self._leader is not None else None
        self._modes.stepped(is_end=optimizer is leader)
        if optimizer is leader:
            self._steps_of_others = 0
            self._steps.end_counted()
            self._steps.start()
            return
        if optimizer not in self._joined and recorder.ordinal < PATIENCE_STEPS:
            self._join(optimizer)
        self._steps_of_others += 1
        if leader is None or self._steps_of_others > PATIENCE_STEPS or self._has_leaders_parameters(optimizer):
            is_first = self._leader is None
            self._leader = weakref.ref(optimizer)
            self._leaders_parameters = frozenset(id(parameter) for parameter in _parameters(optimizer))
            self._modes.follow(_parameters(optimizer))
            self._steps_of_others = 0
            if not is_first:
                self._steps.end_counted()
            self._steps.start()

    def _has_leaders_parameters(self, optimizer: Any) -> bool:
        return any(id(parameter) in self._leaders_parameters for parameter in _parameters(optimizer))

    def _join(self, optimizer: Any) -> None:
        self._joined.add(optimizer)
        is_first = rank() == 0
        for parameter in _parameters(optimizer):
            if id(parameter) not in self._counted:
                self._counted.add(id(parameter))
                self._share["total"] += _size(parameter) if is_first or _is_shard(parameter) else 0
        self._share["trainable"] = self._share["total"]
        self._steps.declare_parameters(self._share)

    def waited(self, spent_ns: int) -> None:
        if not self._modes.waited(spent_ns):
            self._steps.waited(spent_ns)


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _trains_a_model(optimizer: Any) -> bool:
    """Whether a model's parameter has a gradient; to avoid a scheduler's warning, some loops step without gradients."""
    parameter_type = sys.modules["torch"].nn.Parameter
    return any(isinstance(one, parameter_type) and one.grad is not None for one in _parameters(optimizer))


def _size(parameter: Any) -> int:
    """Return the number of elements of a whole parameter; a flat parameter of FSDP1 contains the original shapes."""
    shapes = getattr(parameter, "_shapes", None) if getattr(parameter, "_is_flat_param", False) else None
    return sum(shape.numel() for shape in shapes) if shapes else size_of(parameter)


def _is_shard(parameter: Any) -> bool:
    """Whether FSDP1 has left only a shard of this original parameter; other parameters have the whole shape."""
    return bool(getattr(parameter, "_fsdp_flattened", False) and not getattr(parameter, "_is_flat_param", False))
