"""Reads the metrics page of a running vLLM server, and computes the difference of two pages."""

from __future__ import annotations

import time
from collections.abc import Mapping

from msgspec import Struct

from effllm.commands.metrics_page import Labelled, fetch_text, samples_of

_GENERATED = ("vllm:generation_tokens_total", "vllm:generation_tokens")  # second name: prometheus_client before 0.4
_PROMPT = ("vllm:prompt_tokens_total", "vllm:prompt_tokens")
_RUNNING = ("vllm:num_requests_running",)
_WAITED_S = ("vllm:time_to_first_token_seconds_sum",)
_WAITED = ("vllm:time_to_first_token_seconds_count",)
_STARTED = ("process_start_time_seconds",)


class NotVllm(ValueError):
    """The page is not a page of a vLLM server. The message names the missing metrics."""


class Page(Struct, frozen=True):
    """The values of a page by labels: a server may have several models and engines. Missing values are ``None``."""

    time_s: float  # monotonic time
    generated: Labelled | None
    prompt: Labelled | None
    running: float | None
    waited_s: Labelled | None  # sum of the times to first tokens
    waited: Labelled | None  # number of first tokens
    started: Labelled | None


class Interval(Struct, frozen=True):
    """The work of a server between two pages."""

    interval_s: float
    generation_tokens: float | None
    prompt_tokens: float | None
    requests_running: float | None
    time_to_first_token_s: float | None  # mean over first tokens in the interval
    restarted: bool = False


def fetch(url: str) -> Page:
    """Return the current page.

    Raises:
        Unreachable: the server did not answer, or answered with an error.
        NotVllm: the page is not a page of a vLLM server.
    """
    return parse(fetch_text(url), time.monotonic())


def parse(text: str, time_s: float) -> Page:
    """Read the names, labels and numbers of a page in the Prometheus text format.

    Raises:
        NotVllm: the page has no metric of vLLM.
    """
    found = samples_of(text)
    if not any(name.startswith("vllm:") for name in found):
        names = "none" if not found else f"{len(found)} other metrics, such as {next(iter(found))[:60]}"
        raise NotVllm(f"not a page of a vLLM server: expected metrics such as {_GENERATED[0]}, but found {names}")
    running = _one(found, _RUNNING)
    return Page(
        time_s=time_s,
        generated=_one(found, _GENERATED),
        prompt=_one(found, _PROMPT),
        running=sum(running.values()) if running is not None else None,
        waited_s=_one(found, _WAITED_S),
        waited=_one(found, _WAITED),
        started=_one(found, _STARTED),
    )


def between(first: Page, second: Page) -> Interval:
    """Return the difference of two pages; it has no tokens if the server was restarted between the pages."""
    counters = [(first.generated, second.generated), (first.prompt, second.prompt), (first.waited, second.waited)]
    is_another = None not in (first.started, second.started) and first.started != second.started
    restarted = is_another or any(_has_decreased(*pair) for pair in counters)
    generated, prompt, waited = (None if restarted else _grown(*pair) for pair in counters)
    waited_s = None if restarted else _grown(first.waited_s, second.waited_s)
    return Interval(
        interval_s=second.time_s - first.time_s,
        generation_tokens=generated,
        prompt_tokens=prompt,
        requests_running=second.running,
        time_to_first_token_s=waited_s / waited if waited_s is not None and waited else None,
        restarted=restarted,
    )


def _one(found: Mapping[str, dict[str, float]], names: tuple[str, ...]) -> dict[str, float] | None:
    return next((found[name] for name in names if name in found), None)


def _has_decreased(first: Labelled | None, second: Labelled | None) -> bool:
    if first is None:
        return False
    return second is None or any(second.get(labels, 0.0) < value for labels, value in first.items())


def _grown(first: Labelled | None, second: Labelled | None) -> float | None:
    if second is None:
        return None
    before = first or {}  # if the first page does not have this metric, its values began at 0
    return sum(value - before.get(labels, 0.0) for labels, value in second.items())
