"""The process of a measured tool: it begins and ends windows at given times, and records the times of both calls.

This module imports only the standard library, because it also runs in the environment of the compared tools.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TextIO


class Calls(NamedTuple):
    """Start and end of the two calls around a window, in ns of the monotonic clock."""

    begin_ns: int
    begun_ns: int
    end_ns: int
    ended_ns: int


@dataclass(frozen=True)
class Reading:
    """A tool's result for one window, and the time that the result covers.

    ``start_ns`` and ``end_ns`` are the tool's own stamps, if the tool reports stamps.  A call of a tool takes time,
    so the true energy is calculated between the tool's own stamps, not between the calls.
    """

    start_ns: int
    end_ns: int
    joules: list[float | None]  # energy of each GPU, in the order of NVML
    random_j2: list[float] | None = None  # variance of the random error, if the tool reports it
    gain_error: list[float] | None = None  # half-width (95 %) of each sensor's gain error


class Tool:
    """A tool that measures windows, one after the other, on several GPUs."""

    name: str
    version: str

    def __init__(self, gpus: int) -> None:
        raise NotImplementedError

    def begin(self, key: int) -> None:
        """Open window ``key``; the caller waits until the tool has opened the window."""
        raise NotImplementedError

    def end(self, key: int) -> None:
        """Close window ``key``; the caller waits until the tool has closed the window."""
        raise NotImplementedError

    def reading(self, key: int, calls: Calls) -> Reading:
        """Return the result of window ``key``; called only after the last window."""
        raise NotImplementedError

    def cpu_s(self) -> float:
        """Return the CPU time used so far to measure one rank."""
        return time.process_time()

    def close(self) -> None:
        """Release everything."""


def drive(open_tool: type[Tool]) -> None:
    """Read the orders from stdin, measure the windows, and write a line per window and a last line with all results.

    The lines go to the descriptor given in the orders, because tools may print to stdout.
    """
    orders = json.loads(sys.stdin.readline())
    answers = os.fdopen(orders["answers"], "w", buffering=1)
    tool = open_tool(orders["gpus"])
    _say(answers, {"ready": tool.name, "version": tool.version})
    sys.stdin.readline()
    calls: list[Calls] = []
    shares: dict[str, float] = {}
    for block in orders["blocks"]:
        cpu_s, began_s = tool.cpu_s(), time.monotonic()
        for pause_s, length_s in block["windows"]:
            calls.append(_window(tool, len(calls), pause_s, length_s))
            _say(answers, {"done_s": pause_s + length_s})
        shares[block["name"]] = (tool.cpu_s() - cpu_s) / (time.monotonic() - began_s)
    readings = [tool.reading(key, stamps) for key, stamps in enumerate(calls)]
    tool.close()
    rows = [{"calls": stamps, **asdict(reading)} for stamps, reading in zip(calls, readings, strict=True)]
    _say(answers, {"rows": rows, "cpu_shares": shares})


def _window(tool: Tool, key: int, pause_s: float, length_s: float) -> Calls:
    time.sleep(pause_s)
    begin_ns = time.monotonic_ns()
    tool.begin(key)
    begun_ns = time.monotonic_ns()
    time.sleep(length_s)
    end_ns = time.monotonic_ns()
    tool.end(key)
    return Calls(begin_ns, begun_ns, end_ns, time.monotonic_ns())


def _say(answers: TextIO, record: dict[str, Any]) -> None:
    answers.write(json.dumps(record) + "\n")
