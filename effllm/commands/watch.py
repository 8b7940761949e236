"""Print tokens/s and GPU power of a running vLLM server.

Tokens are read from the server's metrics page, for all models and engines. Power is read from the GPUs of this
machine in CUDA_VISIBLE_DEVICES: run the command on the server's machine, with the server's CUDA_VISIBLE_DEVICES.
The server needs no change. While the server does not answer, the request is repeated. After a restart of the
server, the tokens of one interval are unknown.

\b
Examples:
  effllm watch
  effllm watch --vllm http://127.0.0.1:8000/metrics --interval 10
  CUDA_VISIBLE_DEVICES=0,1 effllm watch         # GPUs of the server
  effllm watch --json --count 12 | jq .joules_per_token

Exit status: 0 one or more intervals measured, 1 no interval measured, 2 wrong use.
"""

from __future__ import annotations

import json
import signal
import sys
import textwrap
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from msgspec import Struct

from effllm.agent.gpu_energy import GpuEnergy
from effllm.commands.metrics_page import Labelled, Unreachable, address_of, fetch_text, samples_of
from effllm.commands.output import complain
from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import process_environ
from effllm.views.text.numbers import count_text

_HEADER_EVERY = 20  # intervals
_MAX_WAIT_S = 60.0  # between two requests, while the server does not answer
_COLUMNS = (
    ("time", 8), ("tokens/s", 10), ("prompt/s", 10), ("W", 9), ("J/token", 9), ("J/10k tok", 11), ("reqs", 5),
    ("TTFT s", 8),
)  # fmt: skip

_GENERATED = ("vllm:generation_tokens_total", "vllm:generation_tokens")  # second name: prometheus_client before 0.4
_PROMPT = ("vllm:prompt_tokens_total", "vllm:prompt_tokens")


def main(
    vllm: Annotated[str, typer.Option(metavar="URL", help="Metrics page of a vLLM server.")] = (
        "http://127.0.0.1:8000/metrics"
    ),
    interval: Annotated[float, typer.Option(min=0.5, max=3600.0, metavar="S", help="Seconds between lines.")] = 5.0,
    count: Annotated[
        int, typer.Option(min=0, metavar="N", show_default=False, help="Number of intervals. [default: until Ctrl-C]")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each interval.")] = False,
) -> int:
    """Print a line for each interval until stopped; return 1 if no interval was measured, 2 for wrong use."""
    try:
        address_of(vllm)
        config = read_config(process_environ())
    except (ValueError, ConfigError) as error:
        return complain("watch", str(error), 2)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    energy = GpuEnergy(config.device, process_environ(), min(config.collection_interval_s, interval))
    watch = _Watch(vllm, interval, energy, as_json)
    try:
        energy.start_samplers()
        watch.print_start()
        watch.run(count)
    except KeyboardInterrupt:
        if not watch.num_measured:
            watch.warn("stopped before anything was measured")
    except NotVllm as error:
        watch.warn(str(error))
    except BrokenPipeError:  # stdout was closed, as with `effllm watch | head`
        sys.stderr.close()
        return 0
    finally:
        energy.close()
    watch.print_sums()
    return 0 if watch.num_measured else 1


class _Watch:
    """The state of ``effllm watch``: the last page, and the sums of all intervals."""

    def __init__(self, url: str, interval_s: float, energy: GpuEnergy, as_json: bool) -> None:
        self._url, self._interval_s, self._energy, self._as_json = url, interval_s, energy, as_json
        self._last_page: Page | None = None  # None: no interval ends with the next page
        self._wait_s = interval_s  # between two requests: longer while the server does not answer
        self._last_warning = ""
        self.num_measured = 0  # number of intervals with tokens
        self._tokens = self._joules = self._time_s = 0.0  # sums over these intervals
        self._energy_tokens = self._energy_s = 0.0  # tokens and time of the intervals in which energy was measured

    def print_start(self) -> None:
        if self._as_json:
            return
        gpus = f"{count_text(self._energy.num_gpus, 'GPU')} of this machine"
        power = f"power of {gpus}" if self._energy.num_gpus else f"power is not measured: {self._energy.why_not}"
        print(textwrap.fill(f"Watching {self._url} every {self._interval_s:g} s; {power}", 80))
        if self._energy.is_simulated:
            print("SIMULATED: no GPU is measured; this power is only for tests.")
        sys.stdout.flush()

    def run(self, count: int) -> None:
        """Request the page until stopped, or for ``count`` intervals: count + 1 times, with or without an answer."""
        next_s = time.monotonic()
        num_reads = 0
        while True:
            was_read = self._read_page_and_print()
            num_reads += 1
            if count and num_reads > count:
                return
            # While the server does not answer, the period doubles, because a server may be down for hours.
            self._wait_s = self._interval_s if was_read else min(2 * self._wait_s, max(_MAX_WAIT_S, self._interval_s))
            next_s = max(next_s + self._wait_s, time.monotonic())
            time.sleep(max(next_s - time.monotonic(), 0.0))

    def _read_page_and_print(self) -> bool:
        """Read the page, and print the interval since the last page; return whether a page of vLLM was read."""
        try:
            page = fetch_page(self._url)
        except Unreachable as error:
            self.warn(f"{error}; the request is repeated")
            self._last_page = None  # tokens before the next page are not counted in an interval
            return False
        except NotVllm as error:
            if self._last_page is None and not self.num_measured:
                raise
            self.warn(str(error))
            self._last_page = None
            return False
        if page.generated is None:
            self.warn("the page has no vllm:generation_tokens_total yet")
        elif self._last_warning:
            self._last_warning = ""
        if self._last_page is not None:
            joules = self._energy.take_joules(self._last_page.time_s, page.time_s)
            self._add_and_print_interval(difference(self._last_page, page), joules)
        self._last_page = page
        return True

    def _add_and_print_interval(self, interval: Interval, joules: float | None) -> None:
        """Add an interval to the sums, and print its line."""
        tokens = interval.generation_tokens
        if tokens is not None:
            self.num_measured += 1
            self._tokens += tokens
            self._time_s += interval.interval_s
            if joules is not None:
                self._energy_tokens += tokens
                self._joules += joules
                self._energy_s += interval.interval_s
        row = {
            "time_s": round(time.time(), 3),
            "interval_s": round(interval.interval_s, 6),
            "generation_tokens": tokens,
            "prompt_tokens": interval.prompt_tokens,
            "tokens_per_second": _ratio(tokens, interval.interval_s),
            "prompt_tokens_per_second": _ratio(interval.prompt_tokens, interval.interval_s),
            "gpus": self._energy.num_gpus,
            "joules": joules,
            "watts": _ratio(joules, interval.interval_s),
            "joules_per_token": _ratio(joules, tokens),
            "joules_per_10k_tokens": _ratio(joules, tokens, 1e4),
            "requests_running": interval.requests_running,
            "time_to_first_token_s": interval.time_to_first_token_s,
            "restarted": interval.restarted,
            "simulated": self._energy.is_simulated,
        }
        if self._as_json:
            print(json.dumps(row), flush=True)
            return
        if interval.restarted:
            self.warn("the server was restarted; the tokens of this interval are unknown")
        if (self.num_measured - 1) % _HEADER_EVERY == 0 and tokens is not None:
            print(" ".join(f"{name:>{width}}" for name, width in _COLUMNS))
        names = ("tokens_per_second", "prompt_tokens_per_second", "watts", "joules_per_token", "joules_per_10k_tokens")
        cells = [time.strftime("%H:%M:%S"), *(_number_text(row[name]) for name in names)]
        cells += [_number_text(interval.requests_running, whole=True), _number_text(interval.time_to_first_token_s)]
        print(" ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)), flush=True)

    def warn(self, line: str) -> None:
        """Print a line to stderr, because a program may read stdout; a repeated line is printed once."""
        if line != self._last_warning:
            self._last_warning = line
            complain("watch", f"{self._url}: {line}")

    def print_sums(self) -> None:
        if self._as_json or not self.num_measured:
            return
        parts = [
            f"{self._tokens:,.0f} tokens in {self._time_s:,.1f} s",
            f"{_number_text(self._tokens / self._time_s)} tokens/s",
        ]
        if self._energy_s:
            parts.append(f"{_number_text(self._joules)} J, {_number_text(self._joules / self._energy_s)} W")
        if self._energy_tokens:
            parts.append(f"{_number_text(self._joules / self._energy_tokens)} J/token")
        print(" · ".join(parts), flush=True)


def _ratio(numerator: float | None, denominator: float | None, factor: float = 1.0) -> float | None:
    return factor * numerator / denominator if numerator is not None and denominator else None


def _number_text(value: Any, whole: bool = False) -> str:
    """Return a number with at least four significant digits, or a dash if it is not measured.

    >>> _number_text(1234.5), _number_text(0.01234), _number_text(None)
    ('1,234', '0.01234', '-')
    """
    if value is None:
        return "-"
    if whole or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


class NotVllm(ValueError):
    """The page is not a page of a vLLM server. The message names the missing metrics."""


class Page(Struct, frozen=True):
    """The values of a page by labels: a server may have several models and engines. Missing values are ``None``."""

    time_s: float  # monotonic time
    generated: Labelled | None
    prompt: Labelled | None
    running: float | None  # number of requests that the server works on
    waited_s: Labelled | None  # sum of the times to first tokens
    first_tokens: Labelled | None  # number of first tokens
    process_start_s: Labelled | None


class Interval(Struct, frozen=True):
    """The work of a server between two pages."""

    interval_s: float
    generation_tokens: float | None
    prompt_tokens: float | None
    requests_running: float | None
    time_to_first_token_s: float | None  # mean over first tokens in the interval
    restarted: bool = False


def fetch_page(url: str) -> Page:
    """Return the current page."""
    return parse_page(fetch_text(url), time.monotonic())


def parse_page(text: str, time_s: float) -> Page:
    """Read the names, labels and numbers of a page in the Prometheus text format; without one of vLLM, `NotVllm`."""
    samples = samples_of(text)
    if not any(name.startswith("vllm:") for name in samples):
        names = "none" if not samples else f"{len(samples)} other metrics, such as {next(iter(samples))[:60]}"
        raise NotVllm(f"not a page of a vLLM server: expected metrics such as {_GENERATED[0]}, but found {names}")
    running = samples.get("vllm:num_requests_running")
    return Page(
        time_s=time_s,
        generated=_first_named(samples, _GENERATED),
        prompt=_first_named(samples, _PROMPT),
        running=sum(running.values()) if running is not None else None,
        waited_s=samples.get("vllm:time_to_first_token_seconds_sum"),
        first_tokens=samples.get("vllm:time_to_first_token_seconds_count"),
        process_start_s=samples.get("process_start_time_seconds"),
    )


def difference(old: Page, new: Page) -> Interval:
    """Return the difference of two pages; it has no tokens if the server was restarted between the pages."""
    counters = [(old.generated, new.generated), (old.prompt, new.prompt), (old.first_tokens, new.first_tokens)]
    starts_s = old.process_start_s, new.process_start_s
    restarted = (None not in starts_s and starts_s[0] != starts_s[1]) or any(_has_decreased(*pair) for pair in counters)
    generated, prompt, first_tokens = (None if restarted else _increase(*pair) for pair in counters)
    waited_s = None if restarted else _increase(old.waited_s, new.waited_s)
    return Interval(
        interval_s=new.time_s - old.time_s,
        generation_tokens=generated,
        prompt_tokens=prompt,
        requests_running=new.running,
        time_to_first_token_s=waited_s / first_tokens if waited_s is not None and first_tokens else None,
        restarted=restarted,
    )


def _first_named(samples: Mapping[str, dict[str, float]], names: tuple[str, ...]) -> dict[str, float] | None:
    return next((samples[name] for name in names if name in samples), None)


def _has_decreased(first: Labelled | None, second: Labelled | None) -> bool:
    if first is None:
        return False
    return second is None or any(second.get(labels, 0.0) < value for labels, value in first.items())


def _increase(first: Labelled | None, second: Labelled | None) -> float | None:
    if second is None:
        return None
    before = first or {}  # if the first page does not have this metric, its values began at 0
    return sum(value - before.get(labels, 0.0) for labels, value in second.items())
