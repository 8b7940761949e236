"""torchtitan: the steps of its Trainer, and the tokens that torchtitan counts.

An iteration is a ``train_step`` without the data wait: the time in which torchtitan loads its batches.  The tokens are
all positions of the labels; torchtitan does not report padding.  Peers in tensor, context and pipeline parallelism have
the same batch, so only the first peer counts the batch.  A DTensor has the shape of the whole parameter, so the first
rank of a pipeline stage counts all parameters of the stage.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._layout import DDP, FSDP, SINGLE
from effllm.hooks._parameters import parameters_of
from effllm.hooks._steps import Steps, version
from effllm.hooks._wrap import Call, Guard, around
from effllm.instruments._number import number
from effllm.records.framework_figures import MFU_RATIO, TFLOPS_PER_GPU, TOKENS_PER_S_PER_GPU
from effllm.trainer import ownership
from effllm.trainer.session import status_after

_STEPS = Steps(ownership.FRAMEWORK, "torchtitan", "Step")
_GUARD = Guard("torchtitan")
_LOG_GUARD = Guard("torchtitan's logger")
_COUNT_GUARD = Guard("the parameter count of torchtitan's model")

#: Name in torchtitan's metrics -> name of the figure, and its scale.
FIGURES = {
    "throughput(tps)": (TOKENS_PER_S_PER_GPU, 1.0),
    "tflops": (TFLOPS_PER_GPU, 1.0),
    "mfu(%)": (MFU_RATIO, 0.01),
}


def attach(module: ModuleType) -> None:
    """Hook torchtitan's log, in ``torchtitan.components.metrics``."""
    processor = getattr(module, "MetricsProcessor", None)
    if processor is None or not around(processor, "log", _GUARD, before=_before_log, after=_after_log):
        raise Unknown("torchtitan.components.metrics has no MetricsProcessor.log")
    # With `-m torchtitan.train`, older versions define the Trainer in __main__, and this import cannot be hooked.  When
    # the metrics object is created, the class of the Trainer exists.
    around(processor, "__init__", _GUARD, after=_attach_in_main)


def _attach_in_main(*_: Any) -> None:
    _attach_if_there(sys.modules.get("__main__"))


def attach_trainer(module: ModuleType) -> None:
    """Hook the steps, in ``torchtitan.trainer``, or in ``torchtitan.train`` of older versions."""
    if not _attach_if_there(module):
        raise Unknown(f"{module.__name__} has no Trainer with train and train_step")


def _attach_if_there(module: Any) -> bool:
    trainer = getattr(module, "Trainer", None)
    return (
        hasattr(trainer, "train")
        and around(trainer, "train_step", _GUARD, before=_before_step, after=_after_step, failed=_step_failed)
        and around(trainer, "train", _GUARD, after=lambda *_: _finish("completed"), failed=_train_failed)
    )


_training: TitanTraining | None = None  # the running one


def _before_step(call: Call) -> Any:
    global _training
    trainer = call.args[0]
    if _training is None or _training.trainer is not trainer:
        _training = TitanTraining(trainer)
        _training.begin_training()
    _STEPS.start_step()
    return _training


def _after_step(training: Any, call: Call, result: Any) -> None:
    if training is not None:
        training.end_step()


def _step_failed(training: Any) -> None:
    # The exception at the end of the data is normal; any other exception also ends `train` or the process.
    if training is not None:
        training.drop_counts()


def _before_log(call: Call) -> Any:
    if _training is not None and call.args[0] is _training.processor:
        _training.add_new_counts()
        return _training
    return None


def _after_log(training: Any, call: Call, result: Any) -> None:
    if training is not None:
        training.store_counts_after_log()
        values = _STEPS.record_loss(int(call.get("step")), number(call.get("global_avg_loss")))
        _LOG_GUARD(training.log_values, int(call.get("step")), values)


def _train_failed(_: Any) -> None:
    _finish(status_after(sys.exc_info()[1]))


def _finish(status: str) -> None:
    global _training
    _training = None
    _STEPS.finish(status)


class TitanTraining:
    """One call of ``Trainer.train``."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.processor = trainer.metrics_processor
        config = getattr(trainer, "config", None) or getattr(trainer, "job_config", None)
        self._settings = getattr(config, "training", None)
        model = getattr(config, "model", None) or getattr(config, "model_spec", None)
        words = (getattr(model, name, None) for name in ("name", "flavor"))
        self._model_name = " ".join(word for word in words if isinstance(word, str))  # such as "llama3 8B"
        self._sequence_length = getattr(self._settings, "seq_len", None)
        self._counts_data = _counts_batches(trainer.parallel_dims)  # whether this rank counts its batches
        self._tokens, self._wait_s = 0, 0.0  # tokens and data wait of the running step
        self._tokens_read = self._num_waits_read = 0  # torchtitan's counts when they were last read

    def begin_training(self) -> None:
        """Start the metrics of this rank, and hook torchtitan's checkpoints and evaluations."""
        trainer = self.trainer
        flops = getattr(self.processor, "num_flops_per_token", -1)
        _STEPS.begin_training(
            parameter_share=_COUNT_GUARD(self._parameter_share),
            first_iteration=max(int(trainer.step) - 1, 0),
            total_iterations=getattr(self._settings, "steps", None),
            flops_per_token=flops if flops > 0 else None,
            facts={
                "framework_version": version("torchtitan"),
                "sequence_length": self._sequence_length,
                "gradient_accumulation_steps": getattr(trainer, "gradient_accumulation_steps", None),
                **_layout_facts(trainer.parallel_dims),
                "token_source": "all positions, because padding is unknown",
                "flops_convention": "torchtitan's num_flops_per_token",
                **({"model": self._model_name} if self._model_name else {}),
            },
        )
        for name, method, phase in (("checkpointer", "save", "checkpoint"), ("validator", "validate", "evaluation")):
            _STEPS.wrap_as_phase(type(getattr(trainer, name, None)), method, phase, _GUARD)
        around(type(getattr(self.processor, "logger", None)), "log", _GUARD, before=_record_figures)
        self._tokens_read, self._num_waits_read = self.processor.ntokens_since_last_log, len(self._waits())

    def add_new_counts(self) -> None:
        """Add the tokens and waits that torchtitan has counted since the last reading; its log sets its counts to 0."""
        tokens, waits = self.processor.ntokens_since_last_log, self._waits()
        self._tokens += tokens - self._tokens_read
        self._wait_s += sum(waits[self._num_waits_read :])
        self._tokens_read, self._num_waits_read = tokens, len(waits)

    def store_counts_after_log(self) -> None:
        """Read torchtitan's counts after its log has set them to 0; later readings are compared with these."""
        self._tokens_read, self._num_waits_read = self.processor.ntokens_since_last_log, len(self._waits())

    def end_step(self) -> None:
        self.add_new_counts()
        _STEPS.add_data_wait(int(self._wait_s * 1e9))
        tokens = self._tokens if self._counts_data else 0
        self._tokens, self._wait_s = 0, 0.0
        _STEPS.end_step(tokens, tokens // self._sequence_length if self._sequence_length else 0)

    def drop_counts(self) -> None:
        """Drop the tokens and waits of a step that did not end."""
        self.add_new_counts()
        self._tokens, self._wait_s = 0, 0.0

    def log_values(self, step: int, values: dict[str, float]) -> None:
        measured = {name: value for name, value in values.items() if value == value}  # nan: not measured
        if measured:
            self.processor.logger.log(measured, step)

    def _waits(self) -> list[float]:
        return list(getattr(self.processor, "data_loading_times", ()))

    def _parameter_share(self) -> dict[str, int]:
        share = {"total": 0, "trainable": 0}
        if not _is_first_of_its_stage(self.trainer.parallel_dims):
            return share
        for part in self.trainer.model_parts:  # of this rank's pipeline stage
            counted = parameters_of(part)
            share["total"] += counted.total
            share["trainable"] += counted.trainable
        return share


def _record_figures(call: Call) -> None:
    metrics = call.get("metrics")
    if _training is not None and isinstance(metrics, Mapping):
        logged = {name: value for name in FIGURES if isinstance(value := metrics.get(name), int | float)}
        _STEPS.record_figures({FIGURES[name][0]: FIGURES[name][1] * value for name, value in logged.items()})


def _layout_facts(dims: Any) -> dict[str, Any]:
    names = {"tensor_parallel": "tp", "pipeline_parallel": "pp", "context_parallel": "cp", "expert_parallel": "ep"}
    sizes = {fact: getattr(dims, name, None) for fact, name in names.items()}
    is_sharded = getattr(dims, "dp_shard", 1) > 1
    layout = FSDP if is_sharded else DDP if getattr(dims, "dp_replicate", 1) > 1 else SINGLE
    return {"parallel_layout": layout, **{fact: size for fact, size in sizes.items() if type(size) is int}}


def _counts_batches(dims: Any) -> bool:  # the first of the peers that have the same batch
    for name in ("pp", "cp", "tp"):
        if getattr(dims, f"{name}_enabled", False):
            mesh = dims.get_mesh(name) if hasattr(dims, "get_mesh") else dims.world_mesh[name]
            if mesh.get_local_rank() != 0:
                return False
    return True


def _is_first_of_its_stage(dims: Any) -> bool:
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_initialized():
        return True
    # Pipeline stages are the outermost dimension of torchtitan's ranks.
    size = distributed.get_world_size() // max(getattr(dims, "pp", 1), 1)
    return bool(distributed.get_rank() % size == 0)
