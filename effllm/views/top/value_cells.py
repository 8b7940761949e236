"""The values of the job in the head of the screen: throughput, efficiency, energy, waits, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from effllm.store.summary_text import readable
from effllm.store.window_text import scaled
from effllm.views.top.frame import TopFrame
from effllm.views.top.text import BOLD, DIM, PLAIN, WARNING, Line, fit

CELL = 20  # width of a value with its name
MAX_COLUMNS = 6
J_PER_KWH = 3.6e6


class Cell(NamedTuple):
    """One value: its name, and the tags of which the first with a value is shown."""

    name: str
    tags: tuple[str, ...]
    text: Callable[[float], str]


def _scaled(unit: str) -> Callable[[float], str]:
    def text(value: float) -> str:
        number, prefix = scaled(value)
        return f"{number} {prefix}{unit}".rstrip()

    return text


def _percent(value: float) -> str:
    return f"{readable(100 * value)} %"


def _kwh(joules: float) -> str:
    return f"{readable(joules / J_PER_KWH)} kWh" if joules >= 0.01 * J_PER_KWH else f"{readable(joules)} J"


CELLS = (
    Cell("tok/s/GPU", ("throughput/tokens_per_second_per_gpu",), _scaled("")),
    Cell("MFU", ("throughput/mfu_ratio",), _percent),
    Cell("J/token", ("energy/joules_per_token", "run_energy/joules_per_token"), _scaled("")),
    Cell("goodput", ("goodput/ratio",), _percent),
    Cell("iteration", ("throughput/seconds_per_iteration",), lambda value: f"{readable(value)} s"),
    Cell("data wait", ("throughput/data_wait_ratio",), _percent),
    Cell("power", ("energy/watts_per_gpu",), lambda value: f"{readable(value)} W"),
    Cell("memory", ("memory/peak_gb",), lambda value: f"{readable(value)} GiB"),
    Cell("tok/s", ("throughput/tokens_per_second",), _scaled("")),
    Cell("busy", ("window/pcu_ratio", "pcu_ratio"), _percent),
    Cell("energy", ("energy/total_joules",), _kwh),
    Cell("exposed", ("throughput/exposed_communication_ratio",), _percent),
)


def value_lines(frame: TopFrame, width: int) -> list[Line]:
    """Return the values in as many columns as fit."""
    columns = max(min(width // CELL, MAX_COLUMNS), 1)
    cells = list(_cells(frame))
    return [[part for cell in cells[at : at + columns] for part in cell] for at in range(0, len(cells), columns)]


def _cells(frame: TopFrame) -> Iterator[list[tuple[str, int]]]:
    has_gpus = frame.coverage is None or frame.coverage.gpus_expected > 0
    for cell in CELLS:
        tag = next((one for one in cell.tags if math.isfinite(frame.values.get(one, math.nan))), None)
        name = cell.name if has_gpus else cell.name.replace("GPU", "rank")
        text = "-" if tag is None else cell.text(frame.values[tag])
        is_doubtful = tag is not None and tag in frame.doubtful
        room = CELL - len(name) - 2
        yield [
            (f"{name} ", DIM),
            (fit(text + ("?" if is_doubtful else ""), room), WARNING if is_doubtful else BOLD if tag else PLAIN),
            (" ", PLAIN),
        ]
