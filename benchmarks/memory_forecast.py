"""Forecasts of the memory of a device, on drawn runs whose end is known.  ``python -m benchmarks.memory_forecast``.

No GPU is used: the runs are those of `benchmarks.memory_runs`, the forecasts are those of the agent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import machine
from benchmarks.memory_runs import GROWTH, HEALTHY, LENGTH, PLATEAU, Run, draw
from effllm.memory.watch import FORECAST, DeviceWatch, MemoryWarning

RESULTS = Path(__file__).parent / "results"
NUM_GROWTH, NUM_HEALTHY, NUM_PLATEAU, NUM_LENGTH = 100, 200, 100, 200
LEAD = 50  # iterations between a forecast and the end of the memory
#: A run of the kind LENGTH is judged if it lasts for this number of windows.
MIN_WINDOWS = 20


class Foretold(NamedTuple):
    """The forecasts of one run with growth."""

    ends_at: int
    lead: int | None  # iterations from the first forecast to the end; None without a forecast
    is_inside: bool  # whether the end is in the interval of the first forecast


class Stopped(NamedTuple):
    """The forecast of one run whose growth stops."""

    stops_at: int
    foretold_at: int | None  # iteration of the first forecast; None without a forecast


def warnings_of(run: Run) -> list[tuple[int, MemoryWarning]]:
    """Return the warnings of a run, each with its iteration."""
    watch, found = DeviceWatch(), []
    for reading, is_end in run.readings():
        found += [(reading.iteration, one) for one in watch.add_reading(reading, is_window_end=is_end)]
        if is_end:
            found += [(reading.iteration, one) for one in watch.new_warnings(run.capacity, run.max_positions)]
    return found


def growth(seed: int) -> Foretold:
    """Return the first forecast of a run with growth."""
    run, watch = draw(GROWTH, seed), DeviceWatch()
    ends_at = run.ends_at
    assert ends_at is not None
    for reading, is_end in run.readings():
        list(watch.add_reading(reading, is_window_end=is_end))
        found = watch.forecast(run.capacity) if is_end else None
        if found is not None and watch.is_near(found):
            lead = ends_at - reading.iteration
            return Foretold(ends_at, lead, found.low <= lead <= found.high)
    return Foretold(ends_at, None, False)


def plateau(seed: int) -> Stopped:
    """Return the first forecast of a run whose growth stops."""
    run, watch = draw(PLATEAU, seed), DeviceWatch()
    for reading, is_end in run.readings():
        list(watch.add_reading(reading, is_window_end=is_end))
        found = watch.forecast(run.capacity) if is_end else None
        if found is not None and watch.is_near(found):
            return Stopped(run.stops_at, reading.iteration)
    return Stopped(run.stops_at, None)


def healthy(seed: int) -> list[tuple[int, str, str]]:
    """Return the warnings of a healthy run: iteration, kind, text."""
    return [(iteration, one.kind, one.text) for iteration, one in warnings_of(draw(HEALTHY, seed))]


def length(seed: int) -> dict[str, bool]:
    """Return whether the longest micro-batch of a run fits, and whether it is foretold that it does not."""
    run = draw(LENGTH, seed)
    return {
        "fits": run.longest_needs <= run.capacity,
        "foretold": any(one.kind == FORECAST for _, one in warnings_of(run)),
        "has_time": run.ends_at is None or run.ends_at > MIN_WINDOWS * run.interval,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_forecast", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs")
    given = parser.parse_args()
    part = 10 if given.quick else 1
    with ProcessPoolExecutor(2) as pool:

        def each(of: Callable[[int], Any], number: int) -> list[Any]:
            return list(pool.map(of, range(given.first, given.first + number // part), chunksize=5))

        result = _result(
            each(growth, NUM_GROWTH), each(healthy, NUM_HEALTHY), each(plateau, NUM_PLATEAU), each(length, NUM_LENGTH)
        )
    print(json.dumps(result, indent=1))
    if given.keep:
        about = machine(command="python -m benchmarks.memory_forecast --keep")
        path = RESULTS / f"{about['date']}-memory-forecast.json"
        path.write_text(json.dumps({"machine": about, **result}, indent=1) + "\n")
    return 0


def _result(
    grown: list[Foretold], well: list[Any], stopped: list[Stopped], long: list[dict[str, bool]]
) -> dict[str, Any]:
    after = [one for one in stopped if one.foretold_at is not None and one.foretold_at > one.stops_at]
    known = [one for one in long if one["has_time"]]
    too_long = [one for one in known if not one["fits"]]
    return {
        "growth": {
            "runs": len(grown),
            "foretold": sum(one.lead is not None and one.lead >= LEAD for one in grown),
            "inside_interval": sum(one.is_inside for one in grown),
            "median_lead": float(np.median([one.lead for one in grown if one.lead is not None])),
            "late_or_missing": [one for one in grown if one.lead is None or one.lead < LEAD],
        },
        "healthy": {
            "runs": len(well),
            "alarms": [(number, *one) for number, warned in enumerate(well) for one in warned],
        },
        "plateau": {
            "runs": len(stopped),
            "foretold_while_growing": sum(one.foretold_at is not None for one in stopped) - len(after),
            "foretold_after_the_stop": after,
        },
        "known_maximum": {
            "too_long": len(too_long),
            "foretold": sum(one["foretold"] for one in too_long),
            "fits": len(known) - len(too_long),
            "fits_but_foretold": sum(one["foretold"] for one in known if one["fits"]),
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())
