"""Lightning (``lightning.pytorch`` or ``pytorch_lightning``): its Trainer loads effllm's callback from entry points.

An iteration ends with the micro-batch that increases ``trainer.global_step``.  An iteration may have several
micro-batches, because of ``accumulate_grad_batches`` or manual optimization.  Two optimizers that step in one batch
make one iteration.  A batch without a step is part of the next iteration.  The fetch of a batch, its transfer to the
device and Lightning's own work between batches are the data wait.

Tokens are read from batches with ``input_ids``.  For other batches, the first dimension of the first tensor is the
number of samples, and tokens are only measured if the module calls `effllm.count`.  FSDP, DeepSpeed and tensor
parallelism are implemented, but were never tested.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from effllm.config.switches import is_attached, process_environ
from effllm.hooks._batches import Batches
from effllm.hooks._layout import precision_of, strategy_facts
from effllm.hooks._parameters import parameters_of
from effllm.hooks._steps import Steps, version
from effllm.hooks._wrap import Guard
from effllm.instruments._number import number
from effllm.trainer import ownership
from effllm.trainer.session import status_after

_STEPS = Steps(ownership.FRAMEWORK, "lightning", "Step")
_GUARD = Guard("Lightning")
_LOG_GUARD = Guard("Lightning's loggers")
#: Loggers that get no call of their own, because values join the calls of the training (effllm/trainer/trackers.py).
_JOINED = {"WandbLogger", "TrackioLogger"}
_COUNT_GUARD = Guard("the parameter count of Lightning's module")


def callbacks() -> list[Any]:
    """Return the callback for a Trainer of ``lightning.pytorch``; an empty list if metrics are not attached."""
    return _callbacks("lightning.pytorch")


def callbacks_of_pytorch_lightning() -> list[Any]:
    """Return the callback for a Trainer of ``pytorch_lightning``; an empty list if metrics are not attached."""
    return _callbacks("pytorch_lightning")


def _callbacks(package: str) -> list[Any]:
    # A Trainer calls this function, so its package is loaded, and an exception here would end the training.
    hooks: Any = sys.modules.get("effllm.hooks")
    if not (is_attached(process_environ()) or getattr(hooks, "_is_attached", False)):
        return []
    return [callback] if (callback := _GUARD(callback_of, package)) is not None else []


def callback_of(package: str) -> Any:
    """Return a new callback; its class is derived from this package's ``Callback``."""
    if package not in _classes:
        base = import_module(package).Callback
        _classes[package] = type("EfficientLLM", (_Callback, base), {"package": package, "__module__": __name__})
        _STEPS.wrap_as_phase(import_module(package).Trainer, "save_checkpoint", "checkpoint", _GUARD)
    return _classes[package]()


_classes: dict[str, type] = {}  # package -> the class of its callback


class _Callback:
    """The callback of a Trainer; checkpoints do not contain it."""

    package = ""

    def __init__(self) -> None:
        self._training: LightningTraining | None = None

    def __reduce__(self) -> Any:
        return callback_of, (self.package,)  # a Trainer that spawns its ranks sends its callbacks to the ranks

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the metrics before the sanity check, an evaluation that runs before training."""
        self._begin(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the metrics, unless the sanity check has started them."""
        self._begin(trainer, pl_module)

    def _begin(self, trainer: Any, module: Any) -> None:
        if self._training is None:
            training = LightningTraining(trainer, module)
            if _GUARD(training.begin):
                self._training = training

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._training is not None:
            _GUARD(self._training.batch_start)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._training is not None:
            _GUARD(self._training.batch_end, outputs, batch)
            _LOG_GUARD(self._training.log_values)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an evaluation, which may also run before training."""
        if self._training is not None:
            _GUARD(_STEPS.phase_start, "evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._training is not None:
            _GUARD(_STEPS.phase_end)
            self._training.restart_data_wait()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._finish(status_after(exception))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish("completed")

    def _finish(self, status: str) -> None:
        training, self._training = self._training, None
        if training is not None:
            _GUARD(training.finish, status)


class LightningTraining:
    """One ``fit`` of a Trainer."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module
        self._idle_since_ns = 0  # end of a micro-batch without an optimizer step; 0 between iterations
        self._step = 0  # ``global_step`` at the end of the last iteration
        self._has_ended_iteration = False  # whether the last batch ended an iteration
        self._loss: float | None = None  # of the last iteration
        self._batches = Batches(_STEPS)
        self._counts_data = True  # whether this rank counts its batches

    def begin(self) -> bool:
        trainer = self._trainer
        self._step = trainer.global_step
        self._counts_data = _counts_batches(trainer)
        parameters = _COUNT_GUARD(parameters_of, getattr(trainer, "model", None) or self._module)
        has_begun = _STEPS.begin_training(
            parameter_share=parameters.share_of_rank(trainer.global_rank == 0) if parameters else None,
            first_iteration=self._step,
            total_iterations=_total_iterations(trainer, self._module),
            facts={
                "framework_version": version(type(trainer).__module__),
                "model": type(self._module).__name__,
                **strategy_facts(trainer.strategy),
                "precision": precision_of(trainer.precision),
                "gradient_accumulation_steps": trainer.accumulate_grad_batches,
            },
        )
        self._batches.set_model(self._module, None)
        return has_begun

    def batch_start(self) -> None:
        """Begin an iteration, or count the wait before a further micro-batch as data wait."""
        if self._idle_since_ns:
            _STEPS.add_data_wait(time.monotonic_ns() - self._idle_since_ns)
            self._idle_since_ns = 0
        else:
            _STEPS.start_step()

    def restart_data_wait(self) -> None:
        """After an evaluation between two micro-batches, measure the data wait from now on."""
        if self._idle_since_ns:
            self._idle_since_ns = time.monotonic_ns()

    def batch_end(self, outputs: Any, batch: Any) -> None:
        """Count a micro-batch; end the iteration if ``global_step`` has increased."""
        step = self._trainer.global_step
        self._has_ended_iteration = step != self._step
        end_ns = time.monotonic_ns()
        if self._counts_data:
            self._batches.add_batch(batch)
        if not self._has_ended_iteration:
            self._idle_since_ns = end_ns
            return
        self._step, self._idle_since_ns = step, 0
        self._batches.end_iteration(at_ns=end_ns)
        self._loss = number(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)

    def log_values(self) -> None:
        """Record the loss, and pass the measured values to the Trainer's loggers, at their own interval."""
        if not self._has_ended_iteration:
            return
        values = _STEPS.record_loss(self._step, self._loss)
        trainer = self._trainer
        loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
        step = getattr(loop, "_batches_that_stepped", self._step)  # the step in Lightning's own logs
        interval = trainer.log_every_n_steps
        measured = {name: value for name, value in values.items() if value == value}  # nan: not measured
        if measured and interval and (step + 1) % interval == 0 and trainer.is_global_zero:
            for logger in trainer.loggers:
                if not _JOINED.intersection(base.__name__ for base in type(logger).__mro__):
                    logger.log_metrics(measured, step=step)

    def finish(self, status: str) -> None:
        if status == "completed":
            self._batches.finish()
        _STEPS.finish(status)


def _total_iterations(trainer: Any, module: Any) -> int | None:
    if not getattr(module, "automatic_optimization", True):
        return None
    if trainer.max_steps and trainer.max_steps > 0:
        return int(trainer.max_steps)
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if not isinstance(batches, int) or not epochs or epochs < 0:
        return None
    return int(-(-batches // trainer.accumulate_grad_batches) * epochs)  # iterations of an epoch, rounded up


def _counts_batches(trainer: Any) -> bool:
    """Whether this rank counts its batch: tensor-parallel peers have the same batch, and only the first counts it."""
    mesh: Any = getattr(trainer.strategy, "device_mesh", None)
    if "tensor_parallel" not in (getattr(mesh, "mesh_dim_names", None) or ()):
        return True
    return bool(mesh["tensor_parallel"].get_local_rank() == 0)
