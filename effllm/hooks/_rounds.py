"""The iterations of a loop that is measured by the steps of its optimizers alone; standard library alone.

An iteration here is the time from the end of one step to the end of the next, less the time of torch's DataLoader
for its batches (the data wait).  A wait for a batch from another source is inside it, as run.json records; so is an
evaluation that neither `_modes` nor `effllm.phase` marks, as the summary records.  The first step begins the metrics
and is not measured: the start of its iteration is unknown.

Two optimizers are one iteration.  The one that steps first in a process leads, and an iteration ends when it has
stepped; later work of the others falls into the next iteration, so counts and time are right in sum and shifted
by less than an iteration.  A leader is replaced at once by an optimizer with its parameters (it was made again),
or by the next one after it was deleted; one that only stopped stepping is replaced after 16 steps of others, which
are one long iteration then.  Of an alternation with more than 16 steps in a row of one optimizer, its steps count.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from effllm.hooks._modes import EvalMode
from effllm.hooks._parameters import size_of
from effllm.hooks._steps import Steps, hear_waits, rank
from effllm.hooks._wrap import no_metrics
from effllm.trainer import ownership
from effllm.trainer.collector import get_metrics_collector

MIN_STEPS = 3  # fewer steps of plain tensors are no training
PATIENCE_STEPS = 16  # of other optimizers, until a leader that does not step is replaced


class Rounds:
    """The iterations of a loop, by the steps of its optimizers.

    Args:
        level: of `ownership`.
        name: of the system, as in run.json.
    """

    def __init__(self, level: int, name: str) -> None:
        self._level, self._name = level, name
        self._steps = Steps(level, name)
        self._modes = EvalMode(self._steps)
        self._leader: Any = None  # a weak reference
        self._leaders_parameters: frozenset[int] = frozenset()
        self._steps_of_others = 0
        self._plain_steps = 0  # of optimizers of tensors that are no parameters; counted up to MIN_STEPS
        self._joined: weakref.WeakSet[Any] = weakref.WeakSet()
        self._counted: set[int] = set()  # parameters, by id: those of two optimizers may be the same
        self._share = {"total": 0, "trainable": 0}
        self._watches_cells = False
        self._between_cells: Any = None  # the recorder at the end of a cell
        hear_waits(self)

    def claim(self, optimizer: Any) -> bool:
        """Return whether these steps are counted, without an owner nearer to the user; the first time begins them."""
        if self._steps.is_owner:
            return True
        if not self._steps.claim():
            return False
        if not _trains_a_model(optimizer):
            ownership.release(self._level, self._name)
            if self._plain_steps < MIN_STEPS and any(one.grad is not None for one in _parameters(optimizer)):
                self._plain_steps += 1
                if self._plain_steps == MIN_STEPS:
                    no_metrics("its optimizer steps plain tensors, which are not the parameters of a model")
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        collector = get_metrics_collector()
        declares_parameters = self._steps.may_declare_parameters
        self._leader, self._counted, self._joined = None, set(), weakref.WeakSet()
        self._share = {"total": 0, "trainable": 0}
        facts = {
            "iteration_start": "the end of the optimizer step before, less what torch's DataLoader took",
            **({"parameters_from": "optimizer"} if declares_parameters else {}),
        }
        # An earlier call of the loop may have set the first iteration; 1 is our assumption.
        first = None if collector.is_collecting else 1
        declared = {"iterations_not_measured": 1, "evaluation_in_iterations": True}
        if self._steps.begin(first_iteration=first, facts=facts, is_numbered=first is None, declared=declared):
            self._watch_cells()

    def _watch_cells(self) -> None:
        """Leave the time between the cells of a notebook out of the iteration that the next cell continues."""
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
        """Process an optimizer's step: end the iteration where it leads."""
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
        if leader is None or self._steps_of_others > PATIENCE_STEPS or self._is_heir(optimizer):
            is_first = self._leader is None
            self._leader = weakref.ref(optimizer)
            self._leaders_parameters = frozenset(id(parameter) for parameter in _parameters(optimizer))
            self._modes.follow(_parameters(optimizer))
            self._steps_of_others = 0
            if not is_first:
                self._steps.end_counted()
            self._steps.start()

    def _is_heir(self, optimizer: Any) -> bool:
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
    """Whether a parameter has a gradient: steps without one only silence warnings of schedulers."""
    parameter_type = sys.modules["torch"].nn.Parameter
    return any(isinstance(one, parameter_type) and one.grad is not None for one in _parameters(optimizer))


def _size(parameter: Any) -> int:
    """Return the number of elements of a whole parameter; a flat one of FSDP1 has the shapes of its originals."""
    shapes = getattr(parameter, "_shapes", None) if getattr(parameter, "_is_flat_param", False) else None
    return sum(shape.numel() for shape in shapes) if shapes else size_of(parameter)


def _is_shard(parameter: Any) -> bool:
    """Whether it is the shard that FSDP1 left of an original; all others have the whole shape."""
    return bool(getattr(parameter, "_fsdp_flattened", False) and not getattr(parameter, "_is_flat_param", False))
