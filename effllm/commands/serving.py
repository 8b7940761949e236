"""Reads the metrics page of a running vLLM server, and computes the difference of two pages."""

from __future__ import annotations

import http.client
import math
import socket
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from msgspec import Struct

MAX_BYTES = 8 * 1024 * 1024
LIMIT_S = 5.0
_GENERATED = ("vllm:generation_tokens_total", "vllm:generation_tokens")  # second name: prometheus_client before 0.4
_PROMPT = ("vllm:prompt_tokens_total", "vllm:prompt_tokens")
_RUNNING = ("vllm:num_requests_running",)
_WAITED_S = ("vllm:time_to_first_token_seconds_sum",)
_WAITED = ("vllm:time_to_first_token_seconds_count",)
_STARTED = ("process_start_time_seconds",)

#: Values of one metric by the text of its labels.
Labelled = Mapping[str, float]


class Unreachable(OSError):
    """The page cannot be read now. The message is one sentence."""


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


def address(url: str) -> tuple[str, str, int, str]:
    """Return the scheme, host, port and path of a page; the default path is /metrics.

    Raises:
        ValueError: ``url`` is not an http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not the http(s) URL of a page, such as http://127.0.0.1:8000/metrics")
    port = parts.port or (443 if parts.scheme == "https" else 80)  # raises ValueError for an invalid port
    return parts.scheme, parts.hostname, port, parts.path if parts.path not in ("", "/") else "/metrics"


def fetch(url: str) -> Page:
    """Return the current page.

    Raises:
        Unreachable: the server did not answer, or answered with an error.
        NotVllm: the page is not a page of a vLLM server.
    """
    scheme, host, port, path = address(url)
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=LIMIT_S)
    try:
        text = _read(connection, path)
    except Unreachable:
        raise
    except (TimeoutError, socket.gaierror, ConnectionError) as error:
        reason = "timeout" if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
        raise Unreachable(f"no answer: {reason}") from error
    except (http.client.HTTPException, OSError) as error:
        raise Unreachable(f"not an HTTP answer: {type(error).__name__}: {str(error)[:120]}") from error
    finally:
        connection.close()
    return parse(text.decode("utf-8", "replace"), time.monotonic())


def _read(connection: http.client.HTTPConnection, path: str) -> bytes:
    until_s = time.monotonic() + LIMIT_S
    connection.request("GET", path, headers={"Accept": "text/plain", "Connection": "close"})
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        to = f" to {answer.headers['Location'][:200]}" if answer.headers["Location"] else ""
        raise Unreachable(f"the server answers {answer.status} {answer.reason[:80]}{to}")
    text = b""
    while part := answer.read1(65536):
        text += part
        if len(text) > MAX_BYTES:
            raise Unreachable(f"the page is longer than {MAX_BYTES // 2**20} MiB")
        if time.monotonic() > until_s:  # the connection's timeout applies to each packet
            raise Unreachable(f"the page was not complete within {LIMIT_S:.0f} s")
    return text


def parse(text: str, time_s: float) -> Page:
    """Read the names, labels and numbers of a page in the Prometheus text format.

    Raises:
        NotVllm: the page has no metric of vLLM.
    """
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        # Label values may contain spaces and braces. After the last brace there are only numbers.
        head, brace, tail = line.rpartition("}")
        name, _, labels = head.partition("{") if brace else (*line.split(None, 1), "", "")[:3]
        numbers = tail.split() if brace else line.split()[1:]
        value = _number(numbers[0]) if numbers else None
        if value is not None:
            found.setdefault(name.strip(), {})[labels if brace else ""] = value
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


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


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
