"""Forecasts of the memory of a device, on drawn runs whose end is known.  ``python -m benchmarks.memory_forecast``.

No GPU is used: the runs are those of `benchmarks.memory_runs`, the forecasts are those of the agent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import machine
from benchmarks.memory_runs import GROWTH, HEALTHY, LENGTH, Run, draw
from effllm.memory.device_forecast import MemoryGrowth
from effllm.memory.watch import FORECAST, RISK, DeviceWatch, Warned

RESULTS = Path(__file__).parent / "results"
NUM_GROWTH, NUM_HEALTHY, NUM_LENGTH = 100, 200, 3000
LEAD = 50  # iterations between a forecast and the end of the memory
#: Numbers of windows at which probabilities are compared with what happened.
CHECKED_AT = (20, 40, 80, 160)
BINS = (0.0, 0.02, 0.1, 0.2, 0.35, 0.5, 1.0)


class Foretold(NamedTuple):
    """The forecasts of one run with growth."""

    ends_at: int
    lead: int | None  # iterations from the first forecast to the end; None without a forecast
    is_inside: bool  # whether the end is in the interval of the first forecast


def warnings_of(run: Run) -> list[tuple[int, Warned]]:
    """Return the warnings of a run, each with its iteration."""
    watch, found = DeviceWatch(), []
    for reading, is_end in run.readings():
        found += [(reading.iteration, one) for one in watch.add(reading, is_window_end=is_end)]
        if is_end:
            found += [(reading.iteration, one) for one in watch.warnings(run.capacity, run.max_positions)]
    return found


def growth(seed: int) -> Foretold:
    """Return the first forecast of a run with growth."""
    run = draw(GROWTH, seed)
    ends_at, watch = run.ends_at, DeviceWatch()
    assert ends_at is not None
    for reading, is_end in run.readings():
        watch.forecast.add(reading, is_window_end=is_end)
        found: MemoryGrowth | None = watch.forecast.growth(run.capacity) if is_end else None
        if found is not None and watch.forecast.is_near(found):
            lead = ends_at - reading.iteration
            return Foretold(ends_at, lead, found.low <= lead <= found.high)
    return Foretold(ends_at, None, False)


def healthy(seed: int) -> list[tuple[int, str, str]]:
    """Return the warnings of a healthy run: iteration, kind, text."""
    return [(iteration, one.kind, one.text) for iteration, one in warnings_of(draw(HEALTHY, seed))]


def length(seed: int) -> dict[str, Any]:
    """Return what is foretold about a run with long micro-batches, and what happens."""
    run = draw(LENGTH, seed)
    if run.max_positions:
        kinds = {one.kind for _, one in warnings_of(run)}
        has_time = run.ends_at is None or run.ends_at > CHECKED_AT[0] * run.interval
        return {"fits": run.longest_needs <= run.capacity, "kinds": sorted(kinds), "has_time": has_time}
    return {"probabilities": list(_probabilities(run)), "lengths": run.lengths}


def _probabilities(run: Run) -> list[tuple[float, bool]]:
    """Return probabilities, and whether the memory ran out in the windows that they are about."""
    watch, ends_at, found = DeviceWatch(), run.ends_at, []
    for reading, is_end in run.readings():
        watch.forecast.add(reading, is_window_end=is_end)
        lengths, windows = watch.forecast.lengths, watch.forecast.lengths.windows
        until = reading.iteration + windows * run.interval
        if not is_end or windows not in CHECKED_AT or until > len(run.stays):
            continue
        chance = lengths.probability_above(run.capacity - reading.allocated, windows)
        if chance is not None:
            found.append((chance, ends_at is not None and ends_at <= until))
    return found


def calibration(pairs: list[tuple[float, bool]]) -> list[dict[str, float]]:
    """Return the mean probability and the share of what happened, in bins of the probability."""
    known = np.array(pairs, dtype=float)
    rows = []
    for low, high in pairwise(BINS):
        inside = known[(known[:, 0] >= low) & (known[:, 0] < high if high < 1 else known[:, 0] <= high)]
        if len(inside):
            rows.append({"from": low, "to": high, **_summary(inside.tolist())})
    return rows


def _summary(pairs: list[tuple[float, bool]]) -> dict[str, float]:
    """Return the mean probability and the share of what happened."""
    foretold, happened = (round(float(one), 3) for one in np.mean(np.array(pairs, dtype=float), axis=0))
    return {"count": len(pairs), "foretold": foretold, "happened": happened}


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

        grown, well, long = each(growth, NUM_GROWTH), each(healthy, NUM_HEALTHY), each(length, NUM_LENGTH)
    result = _result(grown, well, long)
    print(json.dumps(result, indent=1))
    if given.keep:
        about = machine(command="python -m benchmarks.memory_forecast --keep")
        path = RESULTS / f"{about['date']}-memory-forecast.json"
        path.write_text(json.dumps({"machine": about, **result}, indent=1) + "\n")
    return 0


def _result(grown: list[Foretold], well: list[Any], long: list[dict[str, Any]]) -> dict[str, Any]:
    alarms = [(number, *one) for number, warned in enumerate(well) for one in warned if one[1] != RISK]
    known = [one for one in long if "fits" in one and one["has_time"]]
    too_long = [one for one in known if not one["fits"]]
    by_kind: dict[str, list[tuple[float, bool]]] = {}
    for one in long:
        by_kind.setdefault(one.get("lengths", ""), []).extend(one.get("probabilities", []))
    pairs = [pair for some in by_kind.values() for pair in some]
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
            "alarms": alarms,
            "risks": sum(one[1] == RISK for warned in well for one in warned),
        },
        "known_maximum": {
            "too_long": len(too_long),
            "foretold": sum(FORECAST in one["kinds"] for one in too_long),
            "as_a_risk": sum(one["kinds"] == [RISK] for one in too_long),
            "fits": len(known) - len(too_long),
            "fits_but_foretold": sum(FORECAST in one["kinds"] for one in known if one["fits"]),
        },
        "unknown_maximum": {
            **_summary(pairs),
            "bins": calibration(pairs),
            "kinds": {kind: _summary(some) for kind, some in sorted(by_kind.items()) if some},
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())
