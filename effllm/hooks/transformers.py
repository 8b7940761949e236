"""Hugging Face Trainer, and systems built on it: TRL's trainers, LLaMA-Factory.

A step begins after its micro-batches were fetched and ends before logging, evaluation and saving.  So AL is
computation and communication, and the data wait is the time in which micro-batches are fetched.  The callback records
the steps. ``Trainer.training_step`` is wrapped to count tokens and samples, and other methods of the Trainer are
wrapped to time evaluations and checkpoints.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from transformers.trainer_callback import TrainerCallback

from effllm.hooks import Unknown
from effllm.hooks._batches import LateSums
from effllm.hooks._parameters import (
    CONVENTION,
    FlopsByWidth,
    Parameters,
    config_of,
    flops_per_token,
    model_name,
    parameters_of,
)
from effllm.hooks._steps import Steps, rank, version
from effllm.hooks._trainer_facts import (
    TrainerFigures,
    counts_positions_and_samples,
    layout_facts,
    max_positions,
    mesh_text,
    precision,
    tensor_parallel_size,
)
from effllm.hooks._wrap import Call, Guard, around
from effllm.instruments.token_counter import CountingCollator
from effllm.trainer import ownership
from effllm.trainer.batch import Batch, read_batch
from effllm.trainer.session import status_after

#: If the mean width of the batches changes by more than this share, the FLOPs are reported again.
WIDTH_TOLERANCE = 0.01

#: Method of a Trainer whose calls are outside of iterations -> phase.
PHASES = {
    "evaluate": "evaluation",
    "predict": "evaluation",
    "_save_checkpoint": "checkpoint",
    "save_model": "checkpoint",
    "_load_best_model": "checkpoint",
}

_GUARD = Guard("transformers")
_COUNT_GUARD = Guard("the number of parameters")
_STEPS = Steps(ownership.FRAMEWORK, "transformers", "Step")


def attach(module: ModuleType) -> None:
    """Hook every Trainer of ``transformers.trainer``."""
    callbacks = getattr(module, "DEFAULT_CALLBACKS", None)
    if not isinstance(callbacks, list):
        raise Unknown("DEFAULT_CALLBACKS")
    global _defaults
    _wrap(module)
    if _Automatic not in callbacks:
        callbacks.append(_Automatic)
    _defaults = callbacks


def attach_reports(module: ModuleType) -> None:
    """Register the callback for ``report_to: efficientllm`` in ``transformers.integrations.integration_utils``."""
    callbacks = getattr(module, "INTEGRATION_TO_CALLBACK", None)
    if not isinstance(callbacks, dict):
        raise Unknown("INTEGRATION_TO_CALLBACK")
    callbacks.setdefault("efficientllm", EfficientLLMCallback)


def measured_training() -> TrainerRun | None:
    """Return the currently measured training, for the hooks of systems built on transformers."""
    return _training


def _wrap(module: ModuleType) -> None:
    trainer_class: Any = getattr(module, "Trainer", None)
    if trainer_class is None or not hasattr(trainer_class, "train") or not hasattr(trainer_class, "training_step"):
        raise Unknown("Trainer.train and Trainer.training_step")
    around(trainer_class, "train", _GUARD, before=_train_begins, after=_train_ended, failed=_train_failed)
    _wrap_inside(trainer_class)


def _wrap_inside(trainer_class: Any) -> None:
    """Wrap the methods that a Trainer calls in training, including methods that a subclass defines."""
    around(trainer_class, "training_step", _GUARD, before=_batch_begins, after=_batch_ended, failed=_leave_batch)
    for name, phase in PHASES.items():
        _STEPS.wrap_as_phase(trainer_class, name, phase, _GUARD, _training_of)


class EfficientLLMCallback(TrainerCallback):  # type: ignore[misc] # transformers is not installed where types are checked
    """Measures the steps of a Trainer, on every rank.

    If a Trainer has several of these callbacks, only the first callback counts.
    """

    def __init__(self) -> None:
        _GUARD(lambda: _wrap(import_module("transformers.trainer")))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Start the metrics with the Trainer's arguments and state."""
        _GUARD(self._begin, args, state, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the start of a step."""
        if self._is_counting:
            _STEPS.start_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the end of a step with its counts."""
        if self._is_counting:
            _GUARD(_training.end_step, args, state)  # type: ignore[union-attr]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the logged loss, and add the measured values to the logs for the Trainer's other callbacks."""
        if self._is_counting and logs and "loss" in logs:
            _GUARD(_record_log, state, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the metrics."""
        if self._is_counting:
            _GUARD(_finish, "completed")

    @property
    def _is_counting(self) -> bool:
        return _training is not None and _training.callback is self

    def _begin(self, args: Any, state: Any, model: Any) -> None:
        global _training
        if _training is not None and _training.callback is not self:
            if _training.trainer is _trainer and _training.is_begun:
                return  # another callback of this Trainer already counts the steps
            _finish("failed")
        if _training is None:
            _training = TrainerRun(self, _trainer)
        if not _training.begin(args, state, model):
            _training = None


class _Automatic(EfficientLLMCallback):
    """The callback that effllm adds; a separate class, since transformers warns about two callbacks of one class."""


_training: TrainerRun | None = None  # the measured training, while it runs
_trainer: Any = None  # the Trainer whose train() runs
_defaults: list[Any] | None = None  # the list `DEFAULT_CALLBACKS` to which effllm has added its callback


class TrainerRun:
    """One run of ``Trainer.train``; the trainer is ``None`` if ``train`` was called before it was wrapped."""

    def __init__(self, callback: EfficientLLMCallback, trainer: Any) -> None:
        self.callback, self.trainer = callback, trainer
        self.is_begun = False  # whether the metrics run for this training
        self.depth = 0  # depth of nested calls: the training_step of a subclass calls that of its parent
        self._late = LateSums(4)  # samples, tokens, tokens with a label, tokens x width of the batch
        self._not_finite = LateSums(1)  # number of losses that are NaN or infinite; the Trainer does not log them
        self._flops = FlopsByWidth()
        self._tokens_processed = 0  # all positions in the micro-batches of this step
        self._has_unknown = False  # whether there was a batch whose tokens cannot be summed
        self._num_batches = 0  # number of counted micro-batches
        self._has_only_ids = False  # whether the last batch had one kind of token ids
        self._last_tokens = 0  # the Trainer's own count of tokens, at the last step
        self.figures = TrainerFigures()
        self._source = ""  # the newest `Batch.source` among the facts of the run; "" before the first batch
        self._is_encoder_decoder = False
        self._counts_positions = self._counts_samples = True  # as `counts_positions_and_samples`
        self._model: Any = None  # of the Trainer, from `begin` on
        self._parameters: Parameters | None = None  # of the model, if they could be counted

    def begin(self, args: Any, state: Any, model: Any) -> bool:
        """Start the metrics; called again if the Trainer restarts with a smaller batch."""
        self._counts_positions, self._counts_samples = counts_positions_and_samples(self.trainer)
        self._is_encoder_decoder = bool(getattr(config_of(model), "is_encoder_decoder", False))
        self._last_tokens = state.num_input_tokens_seen
        self._model = model
        self._parameters = _COUNT_GUARD(parameters_of, model) if model is not None else None
        # The rank of the metrics is used, because transformers may treat each rank as a job of one process.
        self.is_begun = _STEPS.begin_training(
            parameter_share=self._parameters.share_of_rank(rank() == 0) if self._parameters else None,
            first_iteration=state.global_step,
            total_iterations=state.max_steps,
            facts=self._facts(args),
            declared={"max_positions": max_positions(self.trainer, args)},
        )
        return self.is_begun

    @property
    def compares_tokens(self) -> bool:
        """Whether the Trainer counts the same tokens as effllm: those of a single ``input_ids``.

        A Trainer leaves out the tokens of a decoder and of TRL's ``KL_input_ids``; TRL's GRPO counts tokens when it
        generates them.
        """
        return self._has_only_ids and not self._is_encoder_decoder

    def count_micro_batch(self, inputs: Any) -> None:
        batch = read_batch(inputs, self._is_encoder_decoder)
        collator = getattr(self.trainer, "data_collator", None)
        if isinstance(collator, CountingCollator):
            collator.count_batch(batch)
        if batch is None or self._model is None:
            return
        self._num_batches += 1
        self._has_only_ids = [name for name in inputs if str(name).endswith("input_ids")] == ["input_ids"]
        _STEPS.record_positions(batch.tokens_processed)
        if batch.source != self._source or not self._source:
            self._declare_batch_facts(batch)
        if self._counts_positions:
            self._tokens_processed += batch.tokens_processed
        samples = batch.samples if self._counts_samples else 0
        tokens_times_width = batch.tokens * (batch.width or 0)
        positions = (batch.tokens, batch.tokens_loss, tokens_times_width) if self._counts_positions else (0, 0, 0)
        if not self._late.add_numbers((samples, *positions)):
            self._has_unknown = True
            self._late.add_numbers((samples if isinstance(samples, int) else 1, 0, 0, 0))

    def count_if_not_finite(self, loss: Any) -> None:
        """Count a loss if it is NaN or infinite, and the Trainer will log a mean of other losses in its place."""
        is_replaced = getattr(getattr(self.trainer, "args", None), "logging_nan_inf_filter", False)
        if is_replaced and hasattr(loss, "dim") and loss.dim() == 0:
            self._not_finite.add_numbers([loss.detach() * 0 != 0])

    def end_step(self, args: Any, state: Any) -> None:
        """Record the end of a step, and whether a loss was not finite: on a GPU, perhaps a loss of an earlier step."""
        self._end_step(args, state)
        if self._not_finite.take_sums()[0]:
            _STEPS.record_loss(state.global_step, float("nan"))

    def _end_step(self, args: Any, state: Any) -> None:
        new_tokens, self._last_tokens = state.num_input_tokens_seen - self._last_tokens, state.num_input_tokens_seen
        if not self._num_batches:
            # A subclass called training_step with a batch that cannot be read.  The Trainer's own count is for the
            # whole job.
            tokens = int(new_tokens) if state.is_world_process_zero else 0
            samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
            _STEPS.end_step(tokens, samples if self._counts_samples else 0)
            return
        samples, tokens, tokens_loss, tokens_times_width = self._late.take_sums()
        tokens_processed, self._tokens_processed = self._tokens_processed, 0
        _STEPS.end_step(tokens_processed, samples, None if self._has_unknown else tokens, tokens_loss)
        self._flops.add_tokens(tokens, tokens_times_width)
        if self._flops.has_changed(WIDTH_TOLERANCE):
            self._report_flops()

    def finish(self, status: str) -> None:
        """Add the counts that arrived from the GPU after the last step, and end the metrics."""
        if status == "completed":
            samples, tokens, tokens_loss, tokens_times_width = self._late.wait_and_take_sums()
            _STEPS.add_late_counts(samples=samples, tokens=tokens, tokens_loss=tokens_loss)
            self._flops.add_tokens(tokens, tokens_times_width)
            if self._flops.has_changed(0.0):
                self._report_flops()
        _STEPS.finish(status)

    def _report_flops(self) -> None:
        """Replace the FLOPs of a token by the value at the mean width of the batches so far."""
        width = self._flops.mean_width
        flops, forward = self._flops.report_width(width)
        recomputed = forward if _recomputes_activations(getattr(self.trainer, "args", None)) else 0.0
        convention = f"{CONVENTION}; sequence length: mean width of the batches, over the tokens of one rank"
        facts = {"sequence_length": round(width, 1), "flops_convention": convention}
        _STEPS.add_late_facts(flops_per_token=flops, hardware_flops_per_token=flops + recomputed, facts=facts)

    def _declare_batch_facts(self, batch: Batch) -> None:
        """Declare the source of a batch's token count; from the first batch, also the sequence length and the FLOPs."""
        is_first, self._source = not self._source, batch.source or "no text in the batch"
        facts: dict[str, Any] = {"token_source": self._source}
        flops = hardware = None
        if is_first and batch.source and self._parameters is not None:
            args = getattr(self.trainer, "args", None)
            length = batch.width or getattr(args, "max_length", None)
            if length:
                facts["sequence_length"] = length
            if flops_of_token := _COUNT_GUARD(flops_per_token, self._model, self._parameters, length):
                flops, forward = flops_of_token
                if batch.width and (at_zero := _COUNT_GUARD(flops_per_token, self._model, self._parameters, 0)):
                    self._flops = FlopsByWidth(at_zero, flops_of_token, batch.width)
                hardware = flops + (forward if _recomputes_activations(args) else 0.0)
                left_out = "" if length else " ; attention is left out, because the sequence length is unknown"
                facts["flops_convention"] = CONVENTION + left_out
        _STEPS.add_late_facts(flops_per_token=flops, hardware_flops_per_token=hardware, facts=facts)

    def _facts(self, args: Any) -> dict[str, Any]:
        accelerator = getattr(self.trainer, "accelerator", None)
        sizes = getattr(accelerator, "parallelism_config", None)
        facts = {
            "framework_version": version("transformers"),
            "trainer": type(self.trainer).__name__ if self.trainer is not None else None,
            "model": None if self._model is None else model_name(self._model),
            "model_type": getattr(config_of(self._model), "model_type", None),
            "per_device_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "logging_steps": args.logging_steps,
            "precision": precision(args, self._model),
            **layout_facts(self.trainer, args),
            "device_mesh": mesh_text(self.trainer),
            "tensor_parallel": tensor_parallel_size(self.trainer),
            "context_parallel": getattr(sizes, "cp_size", None),
            "sequence_parallel": getattr(sizes, "sp_size", None),
        }
        return {name: value for name, value in facts.items() if value is not None}


def _recomputes_activations(args: Any) -> bool:
    return any(getattr(args, name, False) for name in ("gradient_checkpointing", "activation_checkpointing"))


def _record_log(state: Any, logs: dict[str, Any]) -> None:
    if _training is not None and _training.compares_tokens and state.is_world_process_zero:
        _STEPS.record_figures(_training.figures.take_figures(logs, state.global_step))
    _STEPS.record_loss(state.global_step, logs["loss"])
    if state.is_world_process_zero:
        logs.update(_STEPS.values_for_logs())


def _finish(status: str) -> None:
    global _training
    training, _training = _training, None
    if training is not None:
        training.finish(status)


# --- around the Trainer's methods ---


def _train_begins(call: Call) -> Any:
    global _trainer
    outer, _trainer = _trainer, call.args[0]  # a Trainer may train inside another's train()
    _wrap_inside(type(_trainer))
    # The first of effllm's callbacks measures; it is moved to the front, so that all other callbacks log its values.
    callbacks = getattr(getattr(_trainer, "callback_handler", None), "callbacks", [])
    # A framework such as ms-swift may have replaced the list of callbacks that every Trainer gets.
    defaults = getattr(sys.modules.get("transformers.trainer"), "DEFAULT_CALLBACKS", _defaults)
    is_replaced = _defaults is not None and defaults is not _defaults
    if is_replaced and not any(isinstance(callback, EfficientLLMCallback) for callback in callbacks):
        callbacks.append(_Automatic())
    first = next((callback for callback in callbacks if isinstance(callback, EfficientLLMCallback)), None)
    for callback in [*(callback for callback in callbacks if getattr(callback, "adds_to_logs", False)), first]:
        if callback is not None:
            callbacks.remove(callback)
            callbacks.insert(0, callback)
    return outer, _trainer


def _train_failed(outer_and_own: Any) -> None:
    error = sys.exc_info()[1]
    _train_ended(outer_and_own, status="killed" if isinstance(error, SystemExit) else status_after(error))


def _train_ended(outer_and_own: Any, *_: Any, status: str = "completed") -> None:
    global _trainer
    if outer_and_own is None:
        return
    _trainer, trainer = outer_and_own
    if _training is not None and _training.trainer is trainer:
        _finish(status)


def _batch_begins(call: Call) -> Any:
    if (training := _training_of(call)) is None:
        return None
    training.depth += 1
    if training.depth == 1:
        # In TRL, the method's parameters may be *args; every call passes (self, model, inputs, ...).
        training.count_micro_batch(call.get("inputs", call.args[2] if len(call.args) > 2 else None))
    return training


def _batch_ended(training: TrainerRun | None, call: Call, result: Any) -> None:
    _leave_batch(training)
    if training is not None and not training.depth:
        training.count_if_not_finite(result)


def _leave_batch(training: TrainerRun | None) -> None:
    if training is not None:
        training.depth -= 1


def _training_of(call: Call) -> TrainerRun | None:
    """Return the measured training if this is a call of its Trainer."""
    return _training if _training is not None and _training.trainer is call.args[0] else None
