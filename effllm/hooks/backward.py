"""What backward passes show in any torch loop: the own time of ranks under DistributedDataParallel (DDP), and the loss.

The own time of a rank is the time of an iteration without waits for other ranks; a sync point is where a wait begins.
``torch.autograd.backward``, which ``Tensor.backward`` calls, is the place at which DDP sums gradients.  Each call with
synchronisation is a sync point, and so is the broadcast of buffers in a forward pass.  Only the outermost call in the
thread of the loop counts: checkpointing calls it inside of a backward pass, and other threads may train other models.

The loss is read once in a window and at the end, without a wait for a GPU.  Its scale is not known if an iteration has
several calls, because the loop may divide it, and in loops of frameworks that scale it themselves: then only NaN and
infinity count.
"""

from __future__ import annotations

import atexit
import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._wrap import Call, Guard, around, never_compiled

#: Frameworks, as in run.json, whose loops pass the loss itself to ``backward``; "" for a loop without a framework.
UNSCALED = ("", "torch", "accelerate")

_GUARD, _LOSS_GUARD = Guard("own time of ranks under DDP"), Guard("the loss in backward passes")
_BATCH_GUARD = Guard("the number of tokens in the batches")

_models: weakref.WeakSet[Any] = weakref.WeakSet()  # all models in DDP
_is_inside = False  # whether a marked call of the loop runs
_scaled: tuple[Any, Any] = (lambda: None, None)  # the newest loss with a scale (weak), and the same loss without it


def attach(module: ModuleType) -> None:
    """Wrap ``backward`` in ``torch.autograd``."""
    plain = getattr(module, "backward", None)
    if not callable(plain):
        raise Unknown("torch.autograd has no backward: the own time of ranks under DDP is not measured")
    module.backward = _with_own_time_marks(plain, _backward_begins)  # type: ignore[attr-defined]


def attach_ddp(module: ModuleType) -> None:
    """Hook the creation of each model, and its broadcast of buffers, in ``torch.nn.parallel.distributed``."""
    ddp: Any = getattr(module, "DistributedDataParallel", None)
    plain = getattr(ddp, "_sync_buffers", None)
    if not callable(plain) or not around(ddp, "__init__", _GUARD, after=_keep_model):
        raise Unknown("DistributedDataParallel has no _sync_buffers: the own time of ranks under DDP is not measured")
    ddp._sync_buffers = _with_own_time_marks(plain, _broadcast_begins)


def attach_scaler(module: ModuleType) -> None:
    """Hook the scaling of losses, in ``torch.amp.grad_scaler`` and FSDP's; torch's compiler breaks graphs there."""
    scaler: Any = getattr(module, "ShardedGradScaler", None) or getattr(module, "GradScaler", None)
    plain = getattr(scaler, "scale", None)
    if plain is None:
        return

    @functools.wraps(plain)
    def scale(self: Any, outputs: Any) -> Any:
        result = plain(self, outputs)
        _LOSS_GUARD(_keep_scaled_loss, outputs, result)
        return result

    scaler.scale = never_compiled(scale)  # not `around`: its wrappers share their code, and others may be compiled


def _with_own_time_marks(plain: Callable[..., Any], begins: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
    """Wrap a function: ``begins`` is called before it, and the end of a wait for other ranks is stamped after it.

    ``begins`` returns the recorder of the loop; ``None`` if the call is not of the loop: then nothing is stamped.
    """

    @functools.wraps(plain)
    def marked(*args: Any, **kwargs: Any) -> Any:
        recorder = _GUARD(begins, args)
        if recorder is None:
            return plain(*args, **kwargs)
        try:
            return plain(*args, **kwargs)
        finally:
            _GUARD(_resume_own_time, recorder)

    return never_compiled(marked)


def _recorder_of_loop() -> Any:
    """Return the recorder of the loop in this thread; ``None`` elsewhere, and inside of another call."""
    recorder = _collector().recorder
    return recorder if recorder is not None and not _is_inside and recorder.thread_id == threading.get_ident() else None


@functools.lru_cache(maxsize=1)
def _collector() -> Any:
    from effllm.trainer.collector import get_metrics_collector

    return get_metrics_collector()


def _keep_model(_token: Any, call: Call, _result: Any) -> None:
    _models.add(call.args[0])


def _backward_begins(args: tuple[Any, ...]) -> Any:  # also keeps the loss, and passes the event to other hooks
    global _is_inside
    recorder = _recorder_of_loop()
    if recorder is not None:
        _is_inside = True
        _LOSS_GUARD(_LOSS.keep_newest, recorder, args[0] if args else None)
        if (steps := sys.modules.get("effllm.hooks._steps")) is not None:
            _BATCH_GUARD(steps.pass_backward)
        if any(model.require_backward_grad_sync and model.require_forward_param_sync for model in _models):
            recorder.sync_point()
    return recorder


def _broadcast_begins(_args: tuple[Any, ...]) -> Any:
    global _is_inside
    recorder = _recorder_of_loop()
    if recorder is None or not sys.modules["torch"].is_grad_enabled():  # an evaluation is no part of an iteration
        return None
    _is_inside = True
    recorder.sync_point()
    return recorder


def _resume_own_time(recorder: Any) -> None:
    global _is_inside
    _is_inside = False
    recorder.end_rank_wait()


def _keep_scaled_loss(loss: Any, result: Any) -> None:
    global _scaled
    if hasattr(result, "grad_fn") and hasattr(loss, "detach"):
        _scaled = weakref.ref(result), loss.detach()


def ddp_model_with(parameter: Any) -> Any:
    """Return the model that DDP wraps, with this parameter and the process group of all ranks; ``None`` without one."""
    world_size = sys.modules["torch"].distributed.get_world_size()
    for model in _models:
        if model.process_group.size() == world_size and any(parameter is own for own in model.module.parameters()):
            return model.module
    return None


class _Loss:
    """The loss of the last iteration of each window and of the loop; on the CPU, each loss that is not finite."""

    def __init__(self) -> None:
        self._recorder: Any = None
        self._ordinal = 0  # number of iterations that had ended at the last call of ``backward``
        self._calls = self._calls_before = 0  # calls of ``backward`` in this iteration, and in the iteration before
        self._coming: Any = None  # the newest loss of a window, which may not have arrived yet
        self._newest: Any = None  # the loss of this iteration: a number, or a tensor on a GPU
        self._has_scale = False  # whether the scale of losses is known
        self._last_recorded = 0  # number of the newest iteration whose loss was recorded

    def keep_newest(self, recorder: Any, tensor: Any) -> None:
        """Keep the loss of a ``backward`` call; record that of a window's last iteration later, and NaN at once."""
        if recorder is not self._recorder:
            self.__init__()  # type: ignore[misc] # a new run begins
            self._recorder = recorder
            atexit.unregister(_record_last_loss)
            atexit.register(_record_last_loss)  # runs before the session's handler, which was registered earlier
        if recorder.ordinal != self._ordinal:
            self._calls_before, self._calls, self._ordinal = self._calls, 0, recorder.ordinal
            self._newest = None
            self._record_arrived()
        self._calls += 1
        if self._calls > 1 or not _is_scalar(tensor) or _is_captured(tensor):
            return
        loss = (_scaled[1] if _scaled[0]() is tensor else tensor).detach()
        framework = _collector().declared.facts.run.get("framework", "")
        self._has_scale = self._calls_before == 1 and framework in UNSCALED
        self._newest = loss if loss.is_cuda else float(loss) if loss.device.type == "cpu" else None
        if isinstance(self._newest, float) and (recorder.is_last_of_window or not math.isfinite(self._newest)):
            self._record(recorder.displayed_iteration, self._newest)
        elif recorder.is_last_of_window and self._coming is None:
            from effllm.hooks._batches import LazyNumber

            self._coming = LazyNumber(recorder.displayed_iteration, loss)

    def record_last(self) -> None:
        """Record the loss of the last iteration, if this needs no wait for a GPU."""
        recorder, loss = self._recorder, self._newest
        if recorder is None or not recorder.is_on or recorder.ordinal == self._ordinal:
            return  # the iteration of this loss has not ended
        self._record_arrived()
        if loss is not None and not isinstance(loss, float):
            has_arrived = sys.modules["torch"].cuda.current_stream(loss.device).query()
            loss = float(loss) if has_arrived else None
        if loss is not None:
            self._record(recorder.displayed_iteration - 1, loss, is_over=True)

    def _record_arrived(self) -> None:
        value = self._coming.value_if_ready() if self._coming is not None else None
        if value is not None:
            self._record(self._coming.iteration, value)
            self._coming = None

    def _record(self, iteration: int, value: float, is_over: bool = False) -> None:  # is_over: after the last iteration
        # If the loop or a framework gives its loss, also NaN is in that loss, and must not be counted twice.
        is_meaningful = self._has_scale or not math.isfinite(value)
        if iteration > self._last_recorded and is_meaningful and not self._recorder.has_loss:
            self._last_recorded = iteration
            self._recorder.record_seen_loss(iteration, value, is_over)


def _record_last_loss() -> None:
    _LOSS_GUARD(_LOSS.record_last)


def _is_scalar(tensor: Any) -> bool:
    """Whether a tensor is one number on this rank; to read a DTensor would be a collective."""
    is_tensor = hasattr(tensor, "numel") and not hasattr(tensor, "device_mesh")
    return is_tensor and tensor.numel() == 1 and bool(tensor.is_floating_point())


def _is_captured(tensor: Any) -> bool:
    """Whether a CUDA graph is captured on this stream: then a copy would become a part of the graph."""
    return bool(tensor.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing())


_LOSS = _Loss()
