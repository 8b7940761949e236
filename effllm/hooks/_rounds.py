"""The iterations of a loop that is measured only by the steps of its optimizers.

An iteration is the time from the end of one step to the end of the next step, without the data wait, which is the
time of torch's DataLoader for the batches.  An iteration includes waits for batches from other sources (run.json
records this), and evaluations that neither `EvalMode` nor `effllm.phase` marks (the summary records this).  The first
step starts the metrics and is not measured, because the start of its iteration is unknown.

Several optimizers share one iteration.  The optimizer that steps first in a process is the leader, and its step ends
the iteration.  Later steps of other optimizers are part of the next iteration, so sums of counts and times are
right, but shifted by less than an iteration.  A new optimizer with the leader's parameters becomes the leader at its
first step.  If the leader was deleted, the next optimizer that steps becomes the leader, and its first step is no
iteration, because the start is unknown.  If other optimizers make more than 16 steps without a step of the leader, the
last of these optimizers becomes the leader; all these steps are one iteration.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from effllm.hooks._batches import Batches, counts_of_batch
from effllm.hooks._layout import DDP, FSDP, SINGLE, is_sharded_over_all_ranks
from effllm.hooks._parameters import model_of, num_elements_of, parameters_of
from effllm.hooks._steps import Steps, listen_to_batches, listen_to_waits, rank
from effllm.hooks._wrap import Guard, explain_at_exit
from effllm.trainer import ownership
from effllm.trainer.batch import Batch
from effllm.trainer.collector import get_metrics_collector

MAX_MODULES = 64  # maximal number of remembered modules; a loop sets only a few modules to eval mode

_GUARD = Guard("evaluation by the model's eval()")
_COUNT_GUARD = Guard("the parameter count of the model")
_eval_modes: list[EvalMode] = []
MIN_STEPS = 3  # with fewer steps, an optimizer of plain tensors does not count as training
IDLE_WINDOWS = 100  # an optimizer that has not stepped for more windows than this has no say in which GPUs are measured
MAX_AHEAD = 64  # maximal number of batches that wait for their backward passes
PATIENCE_STEPS = 16  # the leader is replaced if other optimizers make more steps than this while it makes none
MAX_COUNTED_ITERATION = 16  # parameters of an optimizer that steps first in a later iteration are not counted


class EvalMode:
    """Finds the evaluations between the steps of one loop: from the model's ``eval()`` to its ``train()``.

    ``torch.nn.Module.train`` (``eval`` calls it) is wrapped on the class when such a loop begins.  Modules get no
    additional attributes, and compiled calls are passed through.  When a period in eval mode ends, it counts as an
    evaluation under three conditions: no optimizer stepped in the period, no phase or generation was marked in it, and
    the last iteration had no such period.  Because of the last condition, rollouts in every iteration do not count as
    evaluations.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._trained_ids: frozenset[int] = frozenset()  # ids of the trained parameters
        # id of a module -> the module, and whether it is a model: whether it has all trained parameters
        self._checked_modules: dict[int, tuple[weakref.ref[Any], bool]] = {}
        self._since_ns = 0  # start of the eval mode; 0 while the model is not in eval mode
        self._waited_ns = 0  # data wait while the model is in eval mode
        self._marks_at_start: tuple[int, ...] = ()  # `_phase_marks` at the start of the eval mode
        self._was_on_in_this = False  # whether this iteration had a period in eval mode
        self._was_on_in_last = True  # whether the last iteration had one; True before the first

    def watch_model_with(self, parameters: Iterable[Any]) -> None:
        """Watch the eval mode of the model that has these parameters; the first call wraps ``Module.train``."""
        self._trained_ids = frozenset(id(parameter) for parameter in parameters if parameter.requires_grad)
        self._checked_modules.clear()
        self._since_ns = 0
        if self not in _eval_modes:
            _eval_modes.append(self)
        _wrap_module_train(sys.modules["torch"])

    def process_mode(self, module: Any, is_training: bool) -> None:  # of any module; changes of the model's mode count
        recorder = self._steps.recorder
        if recorder is None or is_training != self.is_on or not self._is_model(module):
            return
        now_ns = time.monotonic_ns()
        if not is_training:
            self._since_ns, self._waited_ns, self._marks_at_start = now_ns, 0, _phase_marks()
            if not self._was_on_in_last:
                recorder.publish_evaluation()
            return
        self._was_on_in_this = True
        if not self._was_on_in_last and self._marks_at_start == _phase_marks():
            recorder.count_as_phase(self._since_ns, now_ns)
            self._since_ns = 0  # counted, so there is nothing to drop: waits inside the evaluation are no data waits
        self._drop_evaluation()

    @property
    def is_on(self) -> bool:
        """Whether the model is in eval mode, and no optimizer has stepped in it."""
        return bool(self._since_ns)

    def drop_at_step(self, is_end: bool) -> None:
        """Drop a possible evaluation: the model trains in eval mode.  ``is_end``: this step ends the iteration."""
        self._drop_evaluation()
        if is_end:
            self._was_on_in_last, self._was_on_in_this = self._was_on_in_this, False

    def keep_data_wait(self, spent_ns: int) -> bool:
        """Keep a data wait that is inside a possible evaluation; return whether it is inside."""
        if self._since_ns:
            self._waited_ns += spent_ns
        return bool(self._since_ns)

    def _drop_evaluation(self) -> None:
        if self._since_ns:
            self._since_ns = 0
            self._steps.add_data_wait(self._waited_ns)  # these waits belong to the iteration

    def _is_model(self, module: Any) -> bool:
        entry = self._checked_modules.get(id(module))
        if entry is None or entry[0]() is not module:  # a deleted module may have had this id
            if len(self._checked_modules) >= MAX_MODULES:
                self._checked_modules.clear()
            is_model = self._trained_ids <= {id(parameter) for parameter in module.parameters()}
            entry = self._checked_modules[id(module)] = weakref.ref(module), is_model
        return entry[1]


def _phase_marks() -> tuple[int, ...]:
    """Return values that change when a phase or a generation begins or ends, or when new metrics begin."""
    recorder = get_metrics_collector().recorder
    return (id(recorder), *recorder.phase_marks) if recorder is not None else ()


def _process_mode(module: Any, is_training: bool) -> None:
    for eval_mode in _eval_modes:
        eval_mode.process_mode(module, is_training)


@functools.lru_cache(maxsize=1)
def _wrap_module_train(torch: Any) -> None:
    """Wrap ``torch.nn.Module.train``, once; its nested calls, for submodules, are not processed."""
    module_class = torch.nn.Module
    train = module_class.train
    is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)
    is_inside = False

    @functools.wraps(train)
    def watched_train(self: Any, mode: bool = True) -> Any:
        nonlocal is_inside
        if is_inside or is_compiling():  # compiled code must not depend on effllm
            return train(self, mode)
        _GUARD(_process_mode, self, mode)
        is_inside = True
        try:
            return train(self, mode)
        finally:
            is_inside = False

    module_class.train = watched_train


class OptimizerGpus:
    """Declares the devices of the parameters that optimizers update, also if the loop itself counts iterations.

    A model may move, and a small model of a warm-up may be gone: only the optimizers count that exist and step.
    """

    def __init__(self) -> None:
        self._recorder: Any = None  # of this run
        # Optimizer -> the window of its newest step, and the devices of its parameters.
        self._newest_steps: weakref.WeakKeyDictionary[Any, tuple[int, frozenset[Any]]] = weakref.WeakKeyDictionary()

    def declare_devices(self, optimizer: Any) -> None:  # at each step; only its first step in a window has an effect
        collector = get_metrics_collector()
        if collector.recorder is not self._recorder:
            self._newest_steps, self._recorder = weakref.WeakKeyDictionary(), collector.recorder
        window, newest_step = collector.declared.num_windows, self._newest_steps.get(optimizer)
        if newest_step is not None and newest_step[0] == window:
            return
        devices = newest_step[1] if newest_step is not None else frozenset()
        # All parameters are read only if they were on several devices, or if the first parameter has moved.
        if len(devices) != 1 or next(_parameters_in(optimizer)).device not in devices:
            devices = frozenset(parameter.device for parameter in _parameters_in(optimizer))
        self._newest_steps[optimizer] = window, devices
        in_use = [devices for last, devices in self._newest_steps.values() if window - last <= IDLE_WINDOWS]
        collector.declared.set_parameter_devices(frozenset().union(*in_use))


class BatchCounter:
    """Counts the batches of torch's DataLoader that are followed by a backward pass, and not those of evaluations.

    A backward pass takes the newest batch of each loader that no pass has taken; a loop may fetch all micro-batches
    first.  If a loader returns a batch after a backward pass, the batches that none has taken are put aside: a loop
    skips them or fetches ahead.  If it fetches ahead, backward passes follow the loader's end: these take the others.
    """

    def __init__(self, steps: Steps, evaluation: EvalMode) -> None:
        self._steps, self._evaluation, self.batches = steps, evaluation, Batches(steps)
        self._untaken: dict[int, list[Batch]] = {}  # id of a loader -> its batches since a backward pass, newest last
        self._put_aside: list[Batch] = []  # earlier batches that no backward pass has taken, newest last
        self._has_backward = False  # whether a backward pass has followed the newest batch
        self._is_at_end = False  # whether the last call of a loader returned no batch, because there are no more
        self._counts_batches = False  # whether each batch is trained on one rank only

    def begin_training(self, parameters: Sequence[Any]) -> None:
        """Begin a training; its batches are counted on one rank, under DDP, and under FSDP over all ranks.

        With tensor, context or pipeline parallelism, ranks may have the same batches, so none are counted.
        """
        layout, model = _layout_and_model(parameters)
        self._counts_batches = layout != ""
        self.batches = Batches(self._steps)
        if layout:
            self._steps.add_late_facts(facts={"parallel_layout": layout})
        if model is not None:
            self.batches.set_model(model, _COUNT_GUARD(parameters_of, model))

    def batch_fetched(self, batch: Any, loader: Any) -> None:
        """Keep the counts of a batch, or the end of the loader (``None``)."""
        if not self._steps.is_owner and get_metrics_collector().recorder is not None:
            return  # another system counts; without a recorder, this may be the first batch of a training
        if self._evaluation.is_on or not sys.modules["torch"].is_grad_enabled():
            return  # a batch of an evaluation
        self._is_at_end = batch is None
        if batch is None:
            return
        if self._has_backward:
            self._has_backward = False
            self._put_aside = [*self._put_aside, *chain(*self._untaken.values())][-MAX_AHEAD:]
            self._untaken = {}
        untaken = self._untaken.setdefault(id(loader), [])
        untaken.append(counts_of_batch(batch, self.batches.vocabulary_size is not None))  # the batch itself is not kept
        del untaken[:-MAX_AHEAD]

    def backward_begins(self) -> None:
        self._has_backward = True
        trained = [untaken.pop() for untaken in self._untaken.values() if untaken]
        if not trained and self._is_at_end and self._put_aside:
            trained = [self._put_aside.pop()]
        if self._counts_batches and self._steps.recorder is not None:
            for batch in trained:
                self.batches.add_batch(batch)


class Rounds:
    """The iterations of a loop, from the steps of its optimizers."""

    def __init__(self, level: int, name: str) -> None:
        self._steps = Steps(level, name)
        self._eval_mode = EvalMode(self._steps)
        self._leader: Any = None  # a weak reference
        self._leaders_parameters: dict[int, weakref.ref[Any]] = {}  # by id, which a later parameter may have, too
        self._steps_of_others = 0  # steps of other optimizers since the leader's last step
        self._plain_steps = 0  # number of steps on plain tensors; counted up to MIN_STEPS
        self._counted_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._counted_ids: set[int] = set()  # ids of parameters, because two optimizers may share parameters
        self._share = {"total": 0, "trainable": 0}  # numbers of parameters that this rank declares
        self._gpus = OptimizerGpus()
        self._batch_counter = BatchCounter(self._steps, self._eval_mode)
        self._watches_cells = False  # of a notebook
        self._between_cells: Any = None  # the recorder that was running when a notebook cell ended
        listen_to_waits(self)
        listen_to_batches(self._batch_counter)

    def claim(self, optimizer: Any) -> bool:
        """Return whether these steps are counted; the first counted step starts the metrics."""
        if self._steps.is_owner:
            return True
        if not self._steps.claim():
            return False
        if not _trains_a_model(optimizer):
            ownership.release(self._steps.level, self._steps.name)
            if self._plain_steps < MIN_STEPS and any(tensor.grad is not None for tensor in _parameters_in(optimizer)):
                self._plain_steps += 1
                if self._plain_steps == MIN_STEPS:
                    explain_at_exit("the optimizer updates plain tensors, which are not the parameters of a model")
            return False
        self._begin_metrics()
        return True

    def _begin_metrics(self) -> None:
        collector = get_metrics_collector()
        self._leader, self._counted_ids, self._counted_optimizers = None, set(), weakref.WeakSet()
        self._share = {"total": 0, "trainable": 0}
        facts = {
            "iteration_start": "the end of the previous optimizer step; the time of torch's DataLoader is excluded",
            **({"parameters_from": "optimizer"} if self._steps.may_declare_parameters else {}),
        }
        # An earlier call of the loop may have set the number of the first iteration; without such a call, 1 is assumed.
        first = None if collector.is_collecting else 1
        declared = {"iterations_not_measured": 1, "evaluation_in_iterations": True}
        if self._steps.begin_training(first_iteration=first, facts=facts, is_numbered=False, declared=declared):
            self._watch_cells()

    def _watch_cells(self) -> None:
        """Exclude the time between the cells of a notebook from an iteration that continues in the next cell."""
        find = getattr(sys.modules.get("IPython"), "get_ipython", None)
        shell = find() if find is not None else None
        if shell is not None and not self._watches_cells:
            self._watches_cells = True
            shell.events.register("post_run_cell", self._pause_after_cell)
            shell.events.register("pre_run_cell", self._resume_at_cell)

    def _pause_after_cell(self, *_: Any) -> None:
        self._between_cells = get_metrics_collector().recorder
        self._steps.phase_start("other")

    def _resume_at_cell(self, *_: Any) -> None:
        recorder, self._between_cells = self._between_cells, None
        if recorder is not None and recorder is get_metrics_collector().recorder:
            self._steps.phase_end()

    def process_step(self, optimizer: Any) -> None:
        """Count an optimizer's step: a step of the leader ends the iteration, any other may make a new leader."""
        self._gpus.declare_devices(optimizer)
        if not self.claim(optimizer):
            return
        if (recorder := get_metrics_collector().recorder) is None:
            return
        leader = self._leader() if self._leader is not None else None
        self._eval_mode.drop_at_step(is_end=optimizer is leader)
        if optimizer is leader:
            self._steps_of_others = 0
            self._batch_counter.batches.end_iteration()
            self._steps.start_step()
            return
        if optimizer not in self._counted_optimizers and recorder.ordinal < MAX_COUNTED_ITERATION:
            self._count_parameters(optimizer)
        self._steps_of_others += 1
        if leader is None or self._steps_of_others > PATIENCE_STEPS or self._has_leaders_parameters(optimizer):
            is_first = self._leader is None
            replaces_deleted = leader is None and not is_first and not self._has_leaders_parameters(optimizer)
            self._leader = weakref.ref(optimizer)
            parameters = list(_parameters_in(optimizer))
            self._leaders_parameters = {id(parameter): weakref.ref(parameter) for parameter in parameters}
            self._eval_mode.watch_model_with(parameters)
            self._steps_of_others = 0
            if is_first or (replaces_deleted and recorder.count_as_other_phase()):  # the start is unknown: no iteration
                self._batch_counter.begin_training(parameters)
            else:
                self._batch_counter.batches.end_iteration()
            self._steps.start_step()

    def _has_leaders_parameters(self, optimizer: Any) -> bool:
        leaders = self._leaders_parameters
        own = _parameters_in(optimizer)
        return any(id(parameter) in leaders and leaders[id(parameter)]() is parameter for parameter in own)

    def _count_parameters(self, optimizer: Any) -> None:
        self._counted_optimizers.add(optimizer)
        is_first_rank = rank() == 0  # of FSDP1, each rank counts its shards
        for parameter in _parameters_in(optimizer):
            if id(parameter) not in self._counted_ids:
                self._counted_ids.add(id(parameter))
                self._share["total"] += _num_elements(parameter) if is_first_rank or _has_only_shard(parameter) else 0
        self._share["trainable"] = self._share["total"]  # an optimizer updates all its parameters
        self._steps.declare_parameters(self._share)

    def add_data_wait(self, spent_ns: int) -> None:
        if not self._eval_mode.keep_data_wait(spent_ns):
            self._steps.add_data_wait(spent_ns)


def _layout_and_model(parameters: Sequence[Any]) -> tuple[str, Any]:
    """Return the layout and the model of a training; ("", None) if several ranks may have the same batches."""
    torch: Any = sys.modules["torch"]
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not is_distributed or torch.distributed.get_world_size() == 1:
        return SINGLE, _COUNT_GUARD(model_of, parameters)
    if (model := sys.modules["effllm.hooks.backward"].ddp_model_with(parameters[0])) is not None:
        return DDP, model
    model = _COUNT_GUARD(model_of, parameters)
    return (FSDP, model) if model is not None and _COUNT_GUARD(is_sharded_over_all_ranks, model) else ("", None)


def _parameters_in(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _trains_a_model(optimizer: Any) -> bool:
    """Whether a model's parameter has a gradient; to avoid a scheduler's warning, some loops step without gradients."""
    parameter_type = sys.modules["torch"].nn.Parameter
    return any(isinstance(own, parameter_type) and own.grad is not None for own in _parameters_in(optimizer))


def _num_elements(parameter: Any) -> int:
    """Return the number of elements of a whole parameter; a flat parameter of FSDP1 contains the original shapes."""
    shapes = getattr(parameter, "_shapes", None) if getattr(parameter, "_is_flat_param", False) else None
    return sum(shape.numel() for shape in shapes) if shapes else num_elements_of(parameter)


def _has_only_shard(parameter: Any) -> bool:
    """Whether FSDP1 has left only a shard of this original parameter; other parameters have the whole shape."""
    return bool(getattr(parameter, "_fsdp_flattened", False) and not getattr(parameter, "_is_flat_param", False))
