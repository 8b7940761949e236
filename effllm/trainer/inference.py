"""Requests, which count as iterations in a process that does not train.

One request, or one batch of requests, is one iteration.  AL is the time of an iteration; IT is the number of generated
tokens divided by the time of the iterations.  In a process that trains, generated tokens only add to IT.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from effllm.config.place import read_place
from effllm.config.settings import ConfigError
from effllm.config.switches import process_environ
from effllm.trainer import ownership
from effllm.trainer.collector import get_metrics_collector
from effllm.trainer.counts import counts_of
from effllm.trainer.recorder import Recorder


class InferenceProcess(NamedTuple):
    """Facts of an inference process, for the start of its metrics."""

    facts: Mapping[str, Any] = {}
    parameters: int | None = None
    gpus: Sequence[int] = ()  # the model's GPUs, as positions in CUDA_VISIBLE_DEVICES; if empty, the first GPU


class Requests:
    """The requests of one generator in this process; they are iterations if the process does not train."""

    def __init__(self, level: int, name: str) -> None:
        self.level, self.name = level, name

    @property
    def is_owner(self) -> bool:
        """Whether these requests count as iterations."""
        return ownership.holds(self.level, self.name)

    def start_metrics(self, describe: Callable[[], InferenceProcess] | None = None) -> Recorder | None:
        """Start the metrics if they do not run, and return their recorder; ``None`` if they cannot start.

        In a job of several ranks, a hook's request does not start the metrics, because perhaps some ranks generate
        nothing.  ``describe`` is called only before the metrics are started.
        """
        collector = get_metrics_collector()
        if collector.is_collecting:
            if self.level == ownership.EXPLICIT and not ownership.holder():
                ownership.claim(self.level, self.name)  # not for a hook's request: the process may train
                collector.declared.declare(serves_requests=True)
            return collector.recorder
        try:
            is_alone = read_place(process_environ()).world_size == 1
        except ConfigError:
            return None
        if not (is_alone or self.level == ownership.EXPLICIT) or not ownership.claim(self.level, self.name):
            return None
        with collector.lifecycle.one_thread():
            if not collector.is_collecting:  # else another thread has begun the first request at the same time
                self._start_session(describe, is_alone)
        return collector.recorder

    def _start_session(self, describe: Callable[[], InferenceProcess] | None, is_alone: bool) -> None:
        collector, process = get_metrics_collector(), describe() if describe is not None else InferenceProcess()
        if process.parameters is not None and not collector.declared.has_parameters:
            collector.set_model_parameters(process.parameters)
        collector.lifecycle.start_for_requests(
            {"framework": self.name, **process.facts}, process.gpus if is_alone else ()
        )

    def begin(self, describe: Callable[[], InferenceProcess] | None = None) -> _OpenRequest | None:
        """Begin a request; a nested request is a part of the outer request."""
        recorder = self.start_metrics(describe)
        if recorder is None:
            return None
        is_iteration = self.is_owner and not recorder.generations.depth
        if is_iteration:
            recorder.start()
        # If the training loop itself calls effllm, its iterations include the generations.  Otherwise, a generation
        # during training is a phase.
        recorder.generations.begin(is_phase=not self.is_owner and not ownership.is_explicit())
        return _OpenRequest(recorder, is_iteration)

    def end(
        self, opened: _OpenRequest | None, generated_tokens: int | None = None, prompt_tokens: int = 0, samples: int = 1
    ) -> None:
        """End a request; by default with the tokens of the generations inside it."""
        if opened is None:
            return
        opened.recorder.generations.end(generated_tokens, prompt_tokens)
        if opened.is_iteration:
            opened.recorder.end(0, samples)


class _OpenRequest(NamedTuple):
    recorder: Recorder
    is_iteration: bool  # whether the request counts as an iteration


#: The requests that the program itself declares; requests of hooks are separate.
DECLARED = Requests(ownership.EXPLICIT, "requests")


class Request:
    """``with effllm.request() as r: ...; r.generated(n)``: one request, or one batch of ``samples`` requests.

    If the program passes no counts, the counts of hooks (``generate``, vLLM) inside the request are used.
    """

    def __init__(self, samples: int = 1) -> None:
        self._samples = samples
        self._generated_tokens: int | None = None  # None: the program has passed no count
        self._prompt_tokens = 0
        self._open_request: _OpenRequest | None = None  # in the ``with`` block, if metrics are collected

    def generated(self, tokens: int) -> None:
        """Add tokens that the model generated."""
        self._generated_tokens = _sum_of_counts(self._generated_tokens or 0, tokens)

    def prompt(self, tokens: int) -> None:
        """Add tokens of the prompt."""
        self._prompt_tokens = _sum_of_counts(self._prompt_tokens, tokens)

    def __enter__(self) -> Request:  # noqa: PYI034 - Self is newer than Python 3.10
        self._open_request = DECLARED.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        open_request, self._open_request = self._open_request, None
        DECLARED.end(open_request, self._generated_tokens, self._prompt_tokens, self._samples)


def _sum_of_counts(total: int, more: Any) -> int:
    """Return the sum of two counts; -1 after an invalid count, for which the recorder warns."""
    return -1 if (counts := counts_of(total, more)) is None else sum(counts)


def request(samples: int = 1) -> Request:
    """Measure one request: ``with effllm.request() as r: ...; r.generated(n)``.

    Args:
        samples: number of requests in a batch.
    """
    return Request(samples)


def record_request(
    prompt_tokens: int = 0,
    generated_tokens: int = 0,
    time_s: float | None = None,
    *,
    computation_time_s: float | None = None,
    communication_time_s: float | None = None,
    samples: int = 1,
) -> None:
    """Count a request, or a batch of requests, that has just ended; the first call starts the metrics.

    Time before the start of the metrics cannot be measured, so the first request is not counted, and this is logged.
    To count all requests, call `initialize_efficientllm_metrics` before the first request, or use
    ``with effllm.request()``.  Where requests overlap, their time counts only once.

    Args:
        prompt_tokens: tokens of the prompt.
        generated_tokens: tokens of the answer.
        time_s: duration; by default computation plus communication time, else the time since the last request.
        computation_time_s: time of computation in the request.
        communication_time_s: time in which the request waited for other processes.
        samples: number of requests in a batch.
    """
    is_first = not get_metrics_collector().is_collecting
    recorder = DECLARED.start_metrics()
    if recorder is None:
        return
    if is_first:
        get_metrics_collector().warn(
            "the first request started the metrics, so it is not counted; "
            "to count all requests, call initialize_efficientllm_metrics() first"
        )
        return
    now_ns = time.monotonic_ns()
    took_s, *parts_s = map(_valid_seconds, (time_s, computation_time_s, communication_time_s))
    if took_s is None and (measured_s := [part_s for part_s in parts_s if part_s is not None]):
        took_s = sum(measured_s)
    earliest_start_ns = recorder.earliest_start_ns
    start_ns = earliest_start_ns if took_s is None else max(now_ns - int(took_s * 1e9), earliest_start_ns)
    if DECLARED.is_owner:
        recorder.start(_now=lambda: start_ns)
        recorder.generations.add_generation(generated_tokens, now_ns - start_ns, prompt_tokens)
        recorder.end(0, samples, _now=lambda: now_ns)
    elif took_s is not None:
        recorder.generations.add_generation(generated_tokens, int(took_s * 1e9), prompt_tokens)


def _valid_seconds(value: Any) -> float | None:
    """Return a number from 0 to a year as a time; ``None`` for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and 0 <= value < 3.2e7 else None
