"""Hugging Face Trainer: the callback, to be handed to a Trainer by name as LLaMA-Factory's does.

A step begins after its micro-batches were fetched and ends before logging, evaluation and saving, so AL is
computation and communication, and the fetch is the data wait.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from effllm.collector import finalize_efficientllm_metrics, get_metrics_collector, initialize_efficientllm_metrics


class EfficientLLMCallback(TrainerCallback):  # type: ignore[misc] # transformers is not installed where types are checked
    """Measures the steps of a Trainer; on every rank.

    Samples are those of the arguments, the batch size of a device times the accumulated ones.  Tokens are the
    Trainer's own count where ``include_num_input_tokens_seen`` is on, else those that
    ``initialize_efficientllm_metrics(..., sequence_length, batch_size)`` declared, else not measured.
    """

    def __init__(self) -> None:
        self._collector = get_metrics_collector()
        self._tokens_seen = 0
        self._phase: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Start the metrics with what the Trainer knows by now."""
        parameters = sum(parameter.numel() for parameter in model.parameters()) if model is not None else None
        facts = {
            "style": "Step",
            "framework": "transformers",
            "per_device_batch_size": args.per_device_train_batch_size,
        }
        initialize_efficientllm_metrics(
            None if self._collector.has_parameters else parameters,
            first_iteration=state.global_step,
            total_iterations=state.max_steps,
            facts=facts,
        )
        self._tokens_seen = state.num_input_tokens_seen

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stamp the start of a step."""
        self._end_phase()
        self._collector.record_step_start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stamp its end, and see what the Trainer will do before the next one."""
        seen, self._tokens_seen = state.num_input_tokens_seen - self._tokens_seen, state.num_input_tokens_seen
        # The Trainer's count is the whole job's, so one rank gives it.
        tokens = (seen if state.is_world_process_zero else 0) if state.num_input_tokens_seen else None
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._collector.record_step_end(tokens, samples)
        if control.should_evaluate:
            self._begin_phase("evaluation")
        elif control.should_save:
            self._begin_phase("checkpoint")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the loss that the Trainer logs."""
        if logs and "loss" in logs:
            self._collector.log_metrics(state.global_step, logs["loss"])

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the evaluation; saving comes after it."""
        self._end_phase()
        if control.should_save:
            self._begin_phase("checkpoint")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the checkpoint."""
        self._end_phase()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the metrics."""
        self._end_phase()
        finalize_efficientllm_metrics()

    def _begin_phase(self, name: str) -> None:
        self._end_phase()
        self._phase = self._collector.phase(name)
        self._phase.__enter__()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None
