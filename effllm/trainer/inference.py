"""Requests, which replace iterations in a process that only infers.

A request, or a batch of them, is one iteration: AL is its time, IT the generated tokens over it.  In a process that
trains, generated tokens only add to IT.  Standard library only, because the training process imports it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from effllm.config.place import read_place
from effllm.config.settings import ConfigError
from effllm.config.switches import this_process
from effllm.trainer import ownership
from effllm.trainer.collector import get_metrics_collector
from effllm.trainer.recorder import Recorder

_has_warned = False


class InferenceProcess(NamedTuple):
    """Facts of an inference process, for the start of its metrics."""

    facts: Mapping[str, Any] = {}
    parameters: int | None = None
    gpus: Sequence[int] = ()  # of its model, as positions in CUDA_VISIBLE_DEVICES; the first if empty


class Requests:
    """The requests of one generator in this process; they are iterations if the process does not train.

    Args:
        level: of `ownership`.
        name: of the generator, as in run.json.
    """

    def __init__(self, level: int, name: str) -> None:
        self.level, self.name = level, name

    @property
    def is_owner(self) -> bool:
        """Whether these requests are the iterations."""
        return ownership.holds(self.level, self.name)

    def ready(self, describe: Callable[[], InferenceProcess] | None = None) -> Recorder | None:
        """Return the recorder, and start the metrics for requests if needed; ``None`` if that is not possible.

        In a job of several ranks this does not start the metrics, because perhaps not all ranks generate.

        Args:
            describe: called if this starts the metrics.
        """
        collector = get_metrics_collector()
        if collector.is_collecting:
            if self.level == ownership.EXPLICIT and not ownership.holder():
                ownership.claim(self.level, self.name)  # a hook leaves it to a training that started the metrics
                collector.declared.learn(serves_requests=True)
            return collector.recorder
        try:
            is_alone = read_place(this_process()).world_size == 1
        except ConfigError:
            return None
        if not (is_alone or self.level == ownership.EXPLICIT) or not ownership.claim(self.level, self.name):
            return None
        process = describe() if describe is not None else InferenceProcess()
        if process.parameters is not None and not collector.declared.has_parameters:
            collector.set_model_parameters(process.parameters)
        collector.lifecycle.start_for_requests(
            {"framework": self.name, **process.facts}, process.gpus if is_alone else ()
        )
        return collector.recorder

    def begin(self, describe: Callable[[], InferenceProcess] | None = None) -> _Open | None:
        """Begin a request; one inside another belongs to the outer."""
        recorder = self.ready(describe)
        if recorder is None:
            return None
        is_iteration = self.is_owner and not recorder.generations.depth
        if is_iteration:
            recorder.start()
        # If the loop itself stamps iterations, they include generation; otherwise it is a phase outside of training.
        recorder.generations.start(is_phase=not self.is_owner and not ownership.is_explicit())
        return _Open(recorder, is_iteration)

    def end(
        self, begun: _Open | None, generated_tokens: int | None = None, prompt_tokens: int = 0, samples: int = 1
    ) -> None:
        """End a request; by default its tokens are those counted inside it."""
        if begun is None:
            return
        begun.recorder.generations.end(generated_tokens, prompt_tokens)
        if begun.is_iteration:
            begun.recorder.end(0, samples)


class _Open:
    """A running request."""

    __slots__ = ("is_iteration", "recorder")

    def __init__(self, recorder: Recorder, is_iteration: bool) -> None:
        self.recorder, self.is_iteration = recorder, is_iteration


#: Requests declared by the program's own calls.
DECLARED = Requests(ownership.EXPLICIT, "requests")


class Request:
    """``with effllm.request() as r: ...; r.generated(n)``: one request, or one batch of ``samples``.

    Missing counts are those that hooks (of ``generate``, of vLLM) count inside it.
    """

    def __init__(self, samples: int = 1) -> None:
        self._samples = samples
        self._generated: int | None = None
        self._prompt = 0
        self._begun: _Open | None = None

    def generated(self, tokens: int) -> None:
        """Add tokens that the model generated."""
        self._generated = (self._generated or 0) + tokens

    def prompt(self, tokens: int) -> None:
        """Add tokens of the prompt."""
        self._prompt += tokens

    def __enter__(self) -> Request:  # noqa: PYI034 - Self is newer than Python 3.10
        self._begun = DECLARED.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        begun, self._begun = self._begun, None
        DECLARED.end(begun, self._generated, self._prompt, self._samples)


def request(samples: int = 1) -> Request:
    """Measure one request: ``with effllm.request() as r: ...; r.generated(n)``.

    Args:
        samples: number of requests, if it is a batch.
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
    """Count a request that has just ended, or a batch of them; the first call starts the metrics.

    Time before the start of the metrics cannot be measured, so the first request is left out, which is logged once.
    `initialize_efficientllm_metrics` before the first one, or ``with effllm.request()``, counts all.  If requests
    overlap, no time counts twice.

    Args:
        prompt_tokens: of the prompt.
        generated_tokens: of the answer.
        time_s: its duration; by default the sum of the next two, or else the time since the previous request.
        computation_time_s: computation in it.
        communication_time_s: waiting for others in it.
        samples: number of requests, if it was a batch.
    """
    is_first = not get_metrics_collector().is_collecting
    recorder = DECLARED.ready()
    if recorder is None:
        return
    if is_first:
        _warn_of_first()
        return
    now_ns = time.monotonic_ns()
    took_s = _took_s(time_s, computation_time_s, communication_time_s)
    free_ns = recorder.free_ns
    start_ns = free_ns if took_s is None else max(now_ns - int(took_s * 1e9), free_ns)
    if DECLARED.is_owner:
        recorder.start(_now=lambda: start_ns)
        recorder.generations.add(generated_tokens, now_ns - start_ns, prompt_tokens)
        recorder.end(0, samples, _now=lambda: now_ns)
    elif took_s is not None:
        recorder.generations.add(generated_tokens, int(took_s * 1e9), prompt_tokens)


def _took_s(time_s: Any, computation_s: Any, communication_s: Any) -> float | None:
    if (whole := _seconds(time_s)) is not None:
        return whole
    parts = [part for part in (_seconds(computation_s), _seconds(communication_s)) if part is not None]
    return sum(parts) if parts else None


def _seconds(value: Any) -> float | None:
    """Return a valid time, a number of at least 0 and below a year, or ``None``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and 0 <= value < 3.2e7 else None


def _warn_of_first() -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        get_metrics_collector().warn(
            "the first request started the metrics and is not in them; "
            "initialize_efficientllm_metrics() before it counts all"
        )
