"""Any torch loop: optimizer steps are measured with torch's own global hook, without a change of the loop.

`_rounds` defines the iterations.  If a gradient scaler skips a step, the iteration continues until the next step; under
accelerate this step counts too, because its work was done, and steps that only accumulate gradients do not count.
Optimizers of plain tensors are not measured: such tensors may be an image (then no model is trained) or
DeepSpeed's partitions.  A step under ``torch.compile`` is measured, at the cost of one more graph break.

Every ``import torch`` runs this module.  The import of the counting part takes 15 ms, so this part is imported only at
the first step.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._wrap import Guard, around, explain_at_exit, never_compiled
from effllm.trainer.cuda_graphs import GRAPHS

MIN_BATCHES = 10  # a loop with fewer batches does not count as training

_guard, _accelerate_guard = Guard("torch's optimizer"), Guard("accelerate")


def attach(module: ModuleType) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        raise Unknown("torch.optim.optimizer has no register_optimizer_step_post_hook; torch 2.0 or later is needed")

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        _guard(_process_step, optimizer)

    register(never_compiled(stepped))


def _process_step(optimizer: Any) -> None:
    if not GRAPHS.keep_if_captured(optimizer):  # a captured step has not run
        _rounds().process_step(optimizer)


@functools.lru_cache(maxsize=2)
def _rounds(name: str = "torch") -> Any:  # one object each for loops of torch and of accelerate
    from effllm.hooks._rounds import Rounds
    from effllm.trainer import ownership

    return Rounds(ownership.OPTIMIZER if name == "torch" else ownership.ACCELERATE, name)


def attach_accelerate(module: ModuleType) -> None:
    """Hook ``accelerate.optimizer``; with DeepSpeed, accelerate calls DeepSpeed's engine, which has its own hook."""
    optimizer = getattr(module, "AcceleratedOptimizer", None)
    if optimizer is None or not around(optimizer, "step", _accelerate_guard, before=_claim_step, after=_end_step):
        raise Unknown("accelerate.optimizer has no AcceleratedOptimizer.step")


def _claim_step(call: Any) -> Any:
    """Return the optimizer if it will step; become the owner before torch's own hook runs."""
    accelerated = call.args[0]
    if not accelerated.gradient_state.sync_gradients:
        return None
    _rounds("accelerate").claim(accelerated.optimizer)
    return accelerated.optimizer


def _end_step(optimizer: Any, *_: Any) -> None:
    if optimizer is not None:
        _rounds("accelerate").process_step(optimizer)


def attach_graphs(module: ModuleType) -> None:
    """Watch CUDA graphs, in ``torch.cuda.graphs``; a replay of a captured step is a step."""
    GRAPHS.on_replay = _process_replay
    GRAPHS.watch_class(getattr(module, "CUDAGraph", None))


def _process_replay(optimizers: Sequence[Any]) -> None:
    from effllm.trainer.collector import get_metrics_collector

    if (recorder := get_metrics_collector().recorder) is not None:
        recorder.publish_replay()
    for optimizer in optimizers:
        _guard(_rounds().process_step, optimizer)


def attach_loader(module: ModuleType) -> None:
    """Measure the waits for batches, in ``torch.utils.data.dataloader``."""
    iterator = getattr(module, "_BaseDataLoaderIter", None)
    loader = getattr(module, "DataLoader", None)
    calls = _LoaderCalls()
    if not (
        around(iterator, "__next__", _guard, before=calls.begin, after=calls.end_with_batch, failed=calls.end_no_batch)
        and around(loader, "__iter__", _guard, before=calls.begin, after=calls.end_of_iter, failed=calls.end_of_iter)
    ):
        raise Unknown("torch.utils.data.dataloader has no _BaseDataLoaderIter: iterations include data waits")


class _LoaderCalls:
    """Times the calls of DataLoaders, and passes on their batches; a nested call is a part of the outer call."""

    def __init__(self) -> None:
        self._start_ns = 0  # of the outer call; 0 if no call runs
        self._num_early = 0  # batches before the first step, counted up to MIN_BATCHES
        self._early_batch: Any = None  # the newest of these batches, which a loop may train after the first step
        self._early_loader: Any = None  # the loader that returned it

    def begin(self, _call: Any) -> bool:  # whether this is an outer call
        if self._start_ns:
            return False
        self._start_ns = time.monotonic_ns()
        return True

    def end_of_iter(self, is_outer: bool | None, *_: Any) -> None:
        if is_outer:
            self._end_and_pass_wait()

    def end_no_batch(self, is_outer: bool | None) -> None:
        """End a call that raised ``StopIteration``, because there are no more batches, or another exception."""
        if is_outer and (steps := self._end_and_pass_wait()) is not None:
            steps.pass_batch(None, None)

    def end_with_batch(self, is_outer: bool | None, call: Any, batch: Any) -> None:
        if not is_outer:
            return
        steps = self._end_and_pass_wait()
        if steps is not None:
            if self._early_batch is not None:
                steps.pass_batch(self._early_batch, self._early_loader)
            self._early_batch = self._early_loader = None
            steps.pass_batch(batch, call.args[0])
        elif self._num_early < MIN_BATCHES:
            self._num_early, self._early_batch, self._early_loader = self._num_early + 1, batch, call.args[0]
            if self._num_early == MIN_BATCHES:
                self._early_batch = self._early_loader = None
                explain_at_exit("a DataLoader returned batches, but no step of a torch optimizer was detected")

    def _end_and_pass_wait(self) -> Any:
        """Pass the time of the call on; return the module that counts steps, if any hook does."""
        spent_ns, self._start_ns = time.monotonic_ns() - self._start_ns, 0
        steps = sys.modules.get("effllm.hooks._steps")
        return steps if steps is not None and steps.pass_data_wait(spent_ns) else None
