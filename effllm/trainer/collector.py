"""The original's public class and functions: start and stop the agent, pass the loop's calls to the recorder.

Runs in the training process, so it imports only the standard library and never raises into the loop: an error costs
metrics and one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from effllm.config.place import Place
from effllm.trainer import ownership
from effllm.trainer.counted import Counted
from effllm.trainer.declared import count as positive_count
from effllm.trainer.declared import positive, text
from effllm.trainer.lifecycle import Lifecycle
from effllm.trainer.recorder import Recorder
from effllm.trainer.values import NAN, EfficientLLMMetrics

#: Owners that a stop releases, for the next training in this process.
_OWN_LEVELS = (
    (ownership.EXPLICIT, "calls"),
    (ownership.EXPLICIT, "requests"),
    (ownership.GENERATION, "generation"),
)


class MetricsCollector:
    """The interface of a training loop.

    Args:
        collection_interval: seconds between device samples; by default that of the environment.
        history_size: slots of the ring; by default that of the environment.
    """

    def __init__(self, collection_interval: float | None = None, history_size: int | None = None) -> None:
        self.lifecycle = Lifecycle(collection_interval_s=collection_interval, history_size=history_size)
        self.declared = self.lifecycle.declared
        self._counted = Counted()
        self._counts = False  # whether the loop calls record_iteration_end itself
        self._batch = (0, 0)  # tokens and samples that set_batch_config declared

    @property
    def is_collecting(self) -> bool:
        """Whether an agent runs for this rank."""
        return self.lifecycle.recorder is not None

    @property
    def recorder(self) -> Recorder | None:
        """The recorder for hooks of frameworks; ``None`` while nothing is collected."""
        return self.lifecycle.recorder

    @property
    def has_counted(self) -> bool:
        """Whether the loop has called `count` in the running iteration."""
        return self._counted.has_any

    def start_collection(self) -> None:
        """Start the agent of this rank; a second start, or a start with metrics off, does nothing."""
        if not self.is_collecting:
            self._counted.take()
            self.lifecycle.start()

    def stop_collection(self, status: str = "completed") -> None:
        """End the collection: rank 0 waits for the summary, five seconds at most; a second stop does nothing."""
        if self.is_collecting:
            self.lifecycle.stop(status)
            self._counts = False
            for level, name in _OWN_LEVELS:
                ownership.release(level, name)

    def end_requests(self) -> None:
        """End a run that the first request started, because a training has its own run."""
        if self.lifecycle.is_for_requests:
            self.stop_collection()
            self.declared.forget_requests()

    def warn(self, line: str) -> None:
        """Report one line through the agent, once."""
        self.lifecycle.warn(line)

    # --- the loop's calls ---

    def record_iteration_start(self) -> None:
        """Stamp the start of an iteration: one optimizer step."""
        if (recorder := self.lifecycle.recorder) is not None:
            if not self._counts:
                self._claim()
            recorder.start()

    def record_iteration_end(
        self,
        tokens_processed: int = 0,
        samples_processed: int = 0,
        *,
        tokens: int | None = None,
        tokens_loss: int = 0,
    ) -> None:
        """Stamp the end of an iteration.

        Args:
            tokens_processed: this rank's share of the positions, padding included.
            samples_processed: this rank's share of the samples.
            tokens: positions without padding, used for TT; by default ``tokens_processed``.
            tokens_loss: positions with a label.
        """
        if (recorder := self.lifecycle.recorder) is not None:
            if not self._counts:
                self._claim()
            if self._counted.has_any and not (tokens_processed or samples_processed or tokens or tokens_loss):
                self.end_counted()
            else:
                recorder.end(tokens_processed, samples_processed, tokens, tokens_loss)

    def sync_point(self) -> None:
        """Mark the point where this rank first waits for others: `effllm.sync_point`."""
        if (recorder := self.lifecycle.recorder) is not None:
            recorder.sync_point()

    def set_peer_group(self, name: str, replica: str = "") -> None:
        """Set the group of ranks with the same work: `effllm.set_peer_group`."""
        self.declared.learn(peer_group=text(name)[:200], replica=text(replica)[:200])

    def count(
        self,
        tokens: int | None = None,
        samples: int | None = None,
        tokens_processed: int | None = None,
        tokens_loss: int = 0,
        loss: float | None = None,
    ) -> None:
        """Add counts to the running iteration of this rank: `effllm.count`."""
        if self.is_collecting and (wrong := self._counted.add(tokens, samples, tokens_processed, tokens_loss, loss)):
            self.warn(wrong)

    def end_counted(self, samples: int = 0) -> None:
        """Stamp the end of an iteration with the counts of `count`, for a hook of steps that has no data.

        ``samples`` is the default if `count` was not given samples.
        """
        if (recorder := self.lifecycle.recorder) is not None:
            counts, loss = self._counted.take()
            counts[1] = counts[1] or samples
            recorder.end(*counts)
            if loss is not None:
                recorder.loss(self.declared.facts.first_iteration + recorder.ordinal, loss)

    def _claim(self) -> None:
        """Make the loop itself the owner of the iterations, instead of a framework's hook."""
        self._counts = ownership.claim(ownership.EXPLICIT, "calls")

    def record_step_start(self) -> None:
        """Stamp the start of a step: `record_iteration_start` by LLaMA-Factory's name."""
        if not self.declared.facts.style:
            self.declared.learn(style="Step")
        self.record_iteration_start()

    def record_step_end(self, tokens_processed: int | None = None, samples_processed: int | None = None) -> None:
        """Stamp the end of a step; default counts are those of `set_batch_config`."""
        tokens, samples = self._batch
        self.record_iteration_end(
            tokens if tokens_processed is None else tokens_processed,
            samples if samples_processed is None else samples_processed,
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a period outside the iterations: ``evaluation``, ``checkpoint``, or any other name as ``other``."""
        recorder = self.lifecycle.recorder
        if recorder is None:
            yield
            return
        recorder.phase_start(name)
        try:
            yield
        finally:
            recorder.phase_end()

    def log_metrics(
        self,
        iteration: int | None = None,
        loss: float | None = None,
        writer: Any = None,
        *,
        step: int | None = None,
        tb_writer: Any = None,
    ) -> dict[str, float]:
        """Record the loss, and return the newest received values of the whole job, without waiting.

        Args:
            iteration: the number of the last completed iteration, as shown to users.
            loss: its loss, as a number. A tensor on a GPU is not read, because that would be a synchronisation.
            writer: has ``add_scalar(tag, value, step)``; receives each report's values once.
            step: ``iteration`` by LLaMA-Factory's name.
            tb_writer: ``writer`` by LLaMA-Factory's name.

        Returns:
            The contract's six tags, ``nan`` where a value is not measured (yet).
        """
        iteration, writer = step if iteration is None else iteration, tb_writer if writer is None else writer
        if not self.declared.facts.is_numbered and self.is_collecting:
            self.declared.learn(is_numbered=True)  # once: after a restart, repeated iterations are derived from it
        return self.log_own(iteration, loss, writer)

    def log_own(self, iteration: int | None, loss: float | None = None, writer: Any = None) -> dict[str, float]:
        """Like `log_metrics`, but with our own count, which may restart at 0 in the next attempt."""
        if (recorder := self.lifecycle.recorder) is not None:
            if getattr(loss, "is_cuda", False):
                self.warn("log_metrics was given a loss on the GPU, which is not read: pass loss.item()")
                loss = None
            recorder.loss(iteration, loss)
        values = self.lifecycle.values()
        if writer is not None:
            try:
                values.write(writer)
            except Exception as error:  # noqa: BLE001 - the writer is the caller's: it must not end the loop
                self.warn(f"the writer given to log_metrics failed: {type(error).__name__}: {error}")
        return values.tags()

    def reset(self) -> None:
        """Restart the run-to-date values after the current window."""
        if (recorder := self.lifecycle.recorder) is not None:
            recorder.reset()

    def set_model_parameters(self, model_parameters: int | None = None, *, num_parameters: int | None = None) -> None:
        """Set the number of parameters of the whole model; ``num_parameters`` is LLaMA-Factory's name for it."""
        given = num_parameters if model_parameters is None else model_parameters
        self.declared.learn_parameters(given)

    def set_batch_config(self, sequence_length: int, batch_size: int) -> None:
        """Set the tokens and samples of one step on this rank, for loops that do not count."""
        self._batch = (int(sequence_length) * int(batch_size), int(batch_size))
        self.declared.learn_run({"sequence_length": int(sequence_length), "batch_size": int(batch_size)})

    def record_facts(self, **facts: str | float | bool | None) -> None:
        """Add to the run's facts in ``run.json``; those of rank 0 are used."""
        self.declared.learn_run(facts)

    def calculate_amu(self) -> float:
        """Return the average memory utilization in GB."""
        return self.lifecycle.values().value("amu")

    def calculate_pcu(self) -> float:
        """Return the peak compute utilization, 0..1."""
        return self.lifecycle.values().value("pcu")

    def calculate_al(self) -> float:
        """Return the average latency in seconds per iteration."""
        return self.lifecycle.values().value("al")

    def calculate_tt(self) -> float:
        """Return the token throughput in tokens per parameter and second."""
        return self.lifecycle.values().value("tt")

    def calculate_st(self) -> float:
        """Return the sample throughput in samples per parameter and second."""
        return self.lifecycle.values().value("st")

    def calculate_aec(self) -> float:
        """Return the average energy consumption in watts."""
        return self.lifecycle.values().value("aec")

    def calculate_it(self, tokens_generated: float, total_inference_time: float) -> float:
        """Return the inference throughput in tokens per second; ``nan`` if no time passed."""
        return tokens_generated / total_inference_time if total_inference_time > 0 else NAN

    def get_all_metrics(self) -> EfficientLLMMetrics:
        """Return the newest values."""
        return self.lifecycle.values().all()

    def should_log(self, iteration: int | None) -> bool:
        """Whether a window ends at ``iteration``; never while metrics are off."""
        config = self.lifecycle.config
        if not self.is_collecting or config is None or iteration is None:
            return False
        return iteration % config.log_interval == 0


#: LLaMA-Factory's name.
EfficientLLMCollector = MetricsCollector


_collector: MetricsCollector | None = None


def get_metrics_collector() -> MetricsCollector:
    """Return the collector of this process; before `initialize_efficientllm_metrics` it collects nothing."""
    global _collector
    if _collector is None:
        _collector = MetricsCollector()
    return _collector


#: LLaMA-Factory's name.
get_efficientllm_collector = get_metrics_collector


def initialize_efficientllm_metrics(
    model_parameters: int | None = None,
    *positional: Any,
    collection_interval: float | None = None,
    sequence_length: int = 0,
    batch_size: int = 0,
    parameter_share: Mapping[str, int] | None = None,
    first_iteration: int = 0,
    total_iterations: int | None = None,
    flops_per_token: float | None = None,
    hardware_flops_per_token: float | None = None,
    facts: Mapping[str, Any] | None = None,
    place: Place | None = None,
    is_numbered: bool | None = None,
) -> MetricsCollector:
    """Start the metrics of this rank; call it on every rank, once, before the loop.

    A second call adds to the first.  Both original signatures work with positional arguments:
    ``(n, collection_interval)`` as in Megatron, and ``(n, sequence_length, batch_size, collection_interval)`` as in
    LLaMA-Factory.

    Args:
        model_parameters: parameters of the whole model.
        positional: see above.
        collection_interval: seconds between device samples; by default that of the environment.
        sequence_length: tokens of a sample, for `MetricsCollector.record_step_end` without counts.
        batch_size: samples of a step on this rank, for the same.
        parameter_share: instead, ``total``, ``trainable`` and ``active`` of this rank: the model is the sum over ranks.
        first_iteration: iterations completed by an earlier run of the job.
        total_iterations: their total number, for the remaining time.
        flops_per_token: model FLOPs per token, forward and backward, for MFU.
        hardware_flops_per_token: hardware FLOPs per token, including recomputation, for HFU.
        facts: of the run, for ``run.json``.
        place: of this rank, if the environment does not have it.
        is_numbered: whether ``first_iteration`` is known and not assumed; by default whether it is above 0.
    """
    if len(positional) == 1:
        collection_interval = positional[0]
    elif positional:
        sequence_length, batch_size, collection_interval = (*positional, collection_interval)[:3]
    collector = get_metrics_collector()
    collector.lifecycle.configure(collection_interval, place)
    collector.end_requests()
    if parameter_share is not None:
        collector.declared.learn_share(parameter_share)
    elif model_parameters is not None:
        collector.set_model_parameters(model_parameters)
    collector.declared.learn_first(first_iteration, is_numbered, keeps_earlier=collector.is_collecting)
    collector.declared.learn(
        total_iterations=positive_count(total_iterations) if total_iterations else None,
        flops_per_token=positive(flops_per_token),
        hardware_flops_per_token=positive(hardware_flops_per_token),
    )
    if facts:
        collector.declared.learn_run(facts)
    if sequence_length and batch_size:
        collector.set_batch_config(sequence_length, batch_size)
    if not collector.is_collecting:
        collector.start_collection()
        collector.lifecycle.greet()
    return collector


def should_log_metrics(iteration: int | None = None, *, step: int | None = None) -> bool:
    """Whether a window ends at ``iteration``: divisible by LOG_INTERVAL; never while metrics are off.

    ``step`` is LLaMA-Factory's name for it.
    """
    return get_metrics_collector().should_log(step if iteration is None else iteration)


def finalize_efficientllm_metrics() -> None:
    """End the metrics of this rank; rank 0 waits for the summary, five seconds at most."""
    get_metrics_collector().stop_collection()
