"""The public class and functions of the original EfficientLLM; they start and stop the agent and call the recorder.

This module runs in the training process, so it imports only the standard library and never raises into the loop.
After an error, one line is printed and the metrics are missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from effllm.config.place import Place
from effllm.records.board import TRACKERS
from effllm.trainer import ownership
from effllm.trainer.counts import CallCounts, counts_of, is_on_gpu
from effllm.trainer.declared import positive_count, positive_number, text
from effllm.trainer.lifecycle import Lifecycle
from effllm.trainer.recorder import Recorder
from effllm.trainer.values import JobValues, OriginalMetrics

#: A stop releases these owners of the iterations, because another training may follow in this process.
_OWN_LEVELS = ((ownership.EXPLICIT, "calls"), (ownership.EXPLICIT, "requests"), (ownership.GENERATION, "generation"))


class MetricsCollector(OriginalMetrics):
    """The interface of a training loop.

    Args:
        collection_interval: seconds between device samples; by default the environment's setting.
        history_size: slots of the ring; by default the environment's setting.
    """

    def __init__(self, collection_interval: float | None = None, history_size: int | None = None) -> None:
        self.lifecycle = Lifecycle(collection_interval_s=collection_interval, history_size=history_size)
        self.declared = self.lifecycle.declared
        self._counted = CallCounts()  # the counts of `count` in the running iteration
        self._is_owner = False  # whether the loop's own calls, not those of a hook, count the iterations
        self._batch = (0, 0)  # tokens and samples of a step, from set_batch_config

    @property
    def is_collecting(self) -> bool:
        """Whether an agent runs for this rank."""
        return self.lifecycle.recorder is not None

    @property
    def recorder(self) -> Recorder | None:
        """The recorder for the hooks of frameworks; ``None`` while metrics are not collected."""
        return self.lifecycle.recorder

    @property
    def run_folder(self) -> str:
        """Path of the newest run folder on rank 0; empty on other ranks, before the first run, or without a folder."""
        return self.declared.facts.run_folder

    @property
    def has_counted(self) -> bool:
        """Whether the loop has called `count` in the running iteration."""
        return self._counted.has_any

    def start_collection(self) -> None:
        """Start the agent of this rank; does nothing if the agent runs or metrics are off."""
        with self.lifecycle.one_thread():
            if not self.is_collecting:
                self._counted.take_counts()
                self.lifecycle.start_session()

    def stop_collection(self, status: str = "completed") -> None:
        """End the collection; rank 0 waits up to 5 s for the summary.  A second stop does nothing."""
        with self.lifecycle.one_thread():
            if self.is_collecting:
                self.lifecycle.stop(status)
                self._is_owner = False
                for level, name in _OWN_LEVELS:
                    ownership.release(level, name)

    def end_requests(self) -> None:
        """End a run that began with a request for inference; the training that now begins has a separate run."""
        if self.lifecycle.is_for_requests:
            self.stop_collection()
            self.declared.forget_requests()

    def warn(self, line: str) -> None:
        """Log a line through the agent, once."""
        self.lifecycle.warn(text(line))

    def record_iteration_start(self) -> None:
        """Stamp the start of an iteration: one optimizer step."""
        if (recorder := self.lifecycle.recorder) is not None:
            if not self._is_owner:
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
            tokens_processed: number of positions on this rank, padding included.
            samples_processed: number of samples on this rank.
            tokens: number of positions without padding, used for TT; by default ``tokens_processed``.
            tokens_loss: number of positions with a label.
        """
        if (recorder := self.lifecycle.recorder) is not None:
            if not self._is_owner:
                self._claim()
            if self._counted.has_any and not (tokens_processed or samples_processed or tokens or tokens_loss):
                self.end_counted()  # the loop has called `count` in place of these arguments
            else:
                recorder.end(tokens_processed, samples_processed, tokens, tokens_loss)

    def sync_point(self) -> None:
        """See `effllm.sync_point`."""
        if (recorder := self.lifecycle.recorder) is not None:
            recorder.sync_point()

    def set_peer_group(self, name: str, replica: str = "") -> None:
        """See `effllm.set_peer_group`."""
        self.declared.declare(peer_group=text(name)[:200], replica=text(replica)[:200])

    def count(
        self,
        tokens: int | None = None,
        samples: int | None = None,
        tokens_processed: int | None = None,
        tokens_loss: int = 0,
        loss: float | None = None,
    ) -> None:
        """See `effllm.count`."""
        if not self.is_collecting:
            return
        if not self._counted.add_counts(tokens, samples, tokens_processed, tokens_loss, loss):
            self.warn("effllm.count takes counts of at least 0, not tensors on a GPU; this call is ignored")
            if (recorder := self.lifecycle.recorder) is not None:
                recorder.reject_counts()
        elif is_on_gpu(loss):
            self.warn("effllm.count was given a loss on the GPU, which is not read: pass loss.item()")

    def end_counted(self, samples: int = 0) -> None:
        """Stamp the end of an iteration with the sums of `count`, for a hook without access to the batches.

        ``samples`` is used if no call of `count` had samples.
        """
        if (recorder := self.lifecycle.recorder) is not None:
            counts, loss = self._counted.take_counts()
            counts[1] = counts[1] or samples  # the order is that of `Recorder.end`: the second count is the samples
            recorder.end(*counts)
            if loss is not None:
                recorder.record_loss(self.declared.facts.first_iteration + recorder.ordinal, loss)

    def _claim(self) -> None:  # the iterations, for the loop's own calls
        self._is_owner = ownership.claim(ownership.EXPLICIT, "calls")

    def record_step_start(self) -> None:
        """Stamp the start of a step; LLaMA-Factory's name of `record_iteration_start`."""
        if not self.declared.facts.style:
            self.declared.declare(style="Step")
        self.record_iteration_start()

    def record_step_end(self, tokens_processed: int | None = None, samples_processed: int | None = None) -> None:
        """Stamp the end of a step; by default with the counts of `set_batch_config`."""
        tokens, samples = self._batch
        self.record_iteration_end(
            tokens if tokens_processed is None else tokens_processed,
            samples if samples_processed is None else samples_processed,
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `effllm.phase`."""
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
        """Record the loss; return the newest values of the whole job that this rank has received, without waiting.

        Args:
            iteration: number of the last completed iteration, as shown to users.
            loss: loss of that iteration, as a number. A tensor on a GPU is not read, to avoid a synchronisation.
            writer: an object with ``add_scalar(tag, value, step)``; it receives the values of each report once.
            step: LLaMA-Factory's name of ``iteration``.
            tb_writer: LLaMA-Factory's name of ``writer``.

        Returns:
            Values of the contract's six tags; ``nan`` for a value that is not measured (yet).
        """
        iteration, writer = step if iteration is None else iteration, tb_writer if writer is None else writer
        if not self.declared.facts.is_numbered and self.is_collecting:
            self.declared.declare(is_numbered=True)  # with numbers, iterations repeated after a restart are counted
        return self.log_own(iteration, loss, writer)

    def log_own(self, iteration: int | None, loss: float | None = None, writer: Any = None) -> dict[str, float]:
        """Like `log_metrics`, with an iteration number that effllm counts; each attempt may count from 0."""
        if (recorder := self.lifecycle.recorder) is not None:
            if is_on_gpu(loss):
                self.warn("log_metrics was given a loss on the GPU, which is not read: pass loss.item()")
                loss = None
            recorder.record_loss(iteration, loss)
        values = self._newest_values()
        if writer is not None:
            try:
                values.write_once(writer)
            except Exception as error:  # noqa: BLE001 - the writer is the caller's: it must not end the loop
                self.warn(f"the writer given to log_metrics failed: {type(error).__name__}: {error}")
        return values.values_by_tag()

    def values_for_logs(self) -> dict[str, float]:
        """Return the newest values for a framework's logs; empty if a sink writes into the user's tracker."""
        config = self.lifecycle.config
        is_written = config is not None and not config.sink_options().keys().isdisjoint(TRACKERS)
        return {} if is_written else self._newest_values().values_for_logs()

    def _newest_values(self) -> JobValues:
        """Return the newest values of the job, without waiting."""
        return self.lifecycle.values()

    def reset(self) -> None:
        """Reset the run-to-date values at the end of the current window."""
        if (recorder := self.lifecycle.recorder) is not None:
            recorder.reset()

    def set_model_parameters(self, model_parameters: int | None = None, *, num_parameters: int | None = None) -> None:
        """Set the number of parameters of the whole model; ``num_parameters`` is LLaMA-Factory's argument."""
        given = num_parameters if model_parameters is None else model_parameters
        self.declared.declare_parameters(given)

    def set_batch_config(self, sequence_length: int, batch_size: int) -> None:
        """Set the tokens of a sample and the samples of a step on this rank, for loops that do not count."""
        if (counts := counts_of(sequence_length, batch_size)) is None:
            self.declared.warn_once("set_batch_config: two counts of at least 0 are needed; a call is ignored")
            return
        self._batch = (counts[0] * counts[1], counts[1])
        self.declared.declare(run={**self.declared.facts.run, "sequence_length": counts[0], "batch_size": counts[1]})

    def record_facts(self, **facts: str | float | bool | None) -> None:
        """Add facts of the run to ``run.json``; only the facts of rank 0 are used."""
        self.declared.declare_run_facts(facts)

    def should_log(self, iteration: int | None) -> bool:
        """Whether a window ends at ``iteration``; ``False`` while metrics are off."""
        config = self.lifecycle.config if self.is_collecting else None
        number = counts_of(iteration) if config is not None else None
        return config is not None and number is not None and number[0] % config.log_interval == 0


#: LLaMA-Factory's name.
EfficientLLMCollector = MetricsCollector


_collector: MetricsCollector | None = None


def get_metrics_collector() -> MetricsCollector:
    """Return the collector of this process; it collects nothing before `initialize_efficientllm_metrics`."""
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
    """Start the metrics of this rank.

    Call this function once on every rank, before the loop.  A second call only adds or replaces values.

    Args:
        model_parameters: number of parameters of the whole model.
        positional: ``(collection_interval)`` as in Megatron, or ``(sequence_length, batch_size, collection_interval)``
            as in LLaMA-Factory.
        collection_interval: seconds between device samples; by default the environment's setting.
        sequence_length: tokens of a sample, used by `MetricsCollector.record_step_end` without counts.
        batch_size: samples of a step on this rank, used by `MetricsCollector.record_step_end` without counts.
        parameter_share: ``total``, ``trainable`` and ``active`` of this rank; the model's counts are sums over ranks.
        first_iteration: number of iterations completed by earlier attempts of the job.
        total_iterations: number of iterations of the whole training, for the remaining time.
        flops_per_token: model FLOPs per token, forward and backward, for MFU.
        hardware_flops_per_token: hardware FLOPs per token, including recomputation, for HFU.
        facts: facts of the run, for ``run.json``.
        place: rank, local_rank and world_size, if the environment does not have them.
        is_numbered: whether ``first_iteration`` is known and not assumed; by default it is known if it is above 0.
    """
    if len(positional) == 1:
        collection_interval = positional[0]
    elif positional:
        sequence_length, batch_size, collection_interval = (*positional, collection_interval)[:3]
    collector = get_metrics_collector()
    collector.lifecycle.configure(collection_interval, place)
    collector.end_requests()
    if parameter_share is not None:
        collector.declared.declare_share(parameter_share)
    elif model_parameters is not None:
        collector.set_model_parameters(model_parameters)
    collector.declared.declare_first_iteration(first_iteration, is_numbered, keeps_earlier=collector.is_collecting)
    collector.declared.declare(
        total_iterations=positive_count(total_iterations),
        flops_per_token=positive_number(flops_per_token),
        hardware_flops_per_token=positive_number(hardware_flops_per_token),
    )
    if facts is not None:
        collector.declared.declare_run_facts(facts)
    if (counts := counts_of(sequence_length, batch_size)) is None or all(counts):
        collector.set_batch_config(sequence_length, batch_size)  # both are given, or it warns of an invalid one
    if not collector.is_collecting:
        collector.start_collection()
    return collector


def should_log_metrics(iteration: int | None = None, *, step: int | None = None) -> bool:
    """Whether a window ends at ``iteration``, because LOG_INTERVAL divides it; ``False`` while metrics are off.

    ``step`` is LLaMA-Factory's name of ``iteration``.
    """
    return get_metrics_collector().should_log(step if iteration is None else iteration)


def finalize_efficientllm_metrics() -> None:
    """End the metrics of this rank; rank 0 waits up to 5 s for the summary."""
    get_metrics_collector().stop_collection()
