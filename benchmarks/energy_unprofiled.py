"""Reported and true errors of window energies after five minutes, on sensors without a profile.

``python -m benchmarks.energy_unprofiled``.  Sensors, waves and agent are simulated in virtual time
(`tests/sensor_model.py`).  A wave's period is one iteration; the agent receives the length of an iteration.  Each run
is measured with the sensor of the hardware table, and, as the reference, with the exact lag.  Each set has its own
seed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.energy_tables import Goal
from benchmarks.energy_traces import HELD_OUT, TUNING, drawn
from benchmarks.machine import machine
from effllm.records.energy import NORMAL_95
from tests.nvml_library import Curve
from tests.sensor_model import MeasuredWindow, simulate

RESULTS = Path(__file__).parent / "results"
SEEDS = {TUNING: 20261122, HELD_OUT: 1732050807}
WARM_UP_S = 300.0
RUNS = 3
LENGTHS_S = (5.0, 1.0, 0.2)
#: Number of judged windows per run, by length in s.
JUDGED = {5.0: 24, 1.0: 60, 0.2: 100}
WAVES = ("square", "fast", "sine", "bursts", "steps")
ALL = "all"
MAX_RATIO, MIN_OVERALL, MIN_GROUP = 10.0, 0.93, 0.9


@dataclass(frozen=True)
class SensorKind:
    """A kind of sensor, and a GPU model of the hardware table with this sensor."""

    name: str
    model: str
    tick_s: float
    duty: float
    latest_s: float = 0.0  # largest lag of the counter; each run draws its lag


KINDS = (
    SensorKind("100 of 100 ms", "NVIDIA L40S", 0.1, 1.0),
    SensorKind("100 of 100 ms, late", "NVIDIA L40S", 0.1, 1.0, latest_s=0.08),
    SensorKind("10 of 20 ms", "Tesla V100-SXM2-32GB", 0.02, 0.5),
    SensorKind("25 of 100 ms", "NVIDIA H100 80GB HBM3", 0.1, 0.25),
)


@dataclass(frozen=True)
class Run:
    """One simulation: one wave on one sensor."""

    kind: SensorKind
    wave: str
    curve: Curve
    lag_s: float
    seed: int

    def windows(self, length_s: float, *, lag_is_known: bool) -> list[MeasuredWindow]:
        """Return the windows of this length that follow the first five minutes."""
        lead_s = max(length_s, 1.0)  # a conservative choice: with shorter windows the agent would have more edges
        return simulate(
            self.curve,
            self.seed,
            tick_s=self.kind.tick_s,
            duty=self.kind.duty,
            window_s=length_s,
            count=JUDGED[length_s],
            lead_s=[lead_s] * math.ceil(WARM_UP_S / lead_s),
            lag_is_known=lag_is_known,
            lag_s=self.lag_s,
            name=self.kind.model,
            step_s=self.curve.period_s,
        )


@dataclass(frozen=True)
class Judged:
    """Error and reported half-width of one window, without and with the exact lag, relative to the true energy."""

    error: float
    half_width: float
    known_error: float
    known_half_width: float


@dataclass(frozen=True)
class Row:
    """Results for windows of one length on one kind of sensor, for one wave or for all waves."""

    sensor: str
    wave: str
    length_s: float
    windows: int
    covered: float
    median_error: float
    median_half_width: float
    ratio: float
    #: The smallest half-width that contains the errors of 90 % of a wave's windows, divided by the median error.  For
    #: ALL waves, the median of these half-widths is used.
    needed_ratio: float
    known_covered: float
    known_median_error: float
    known_median_half_width: float
    known_ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.energy_unprofiled", description=__doc__)
    parser.add_argument("--set", choices=(HELD_OUT, TUNING), default=TUNING, help="set of traces (default: tuning)")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs per wave and kind of sensor (default: {RUNS})")
    parser.add_argument("--keep", action="store_true", help="keep the figures in benchmarks/results/")
    given = parser.parse_args()
    began_s = time.monotonic()
    runs = list(drawn_runs(given.set, given.runs))
    rows = judge(runs)
    found = goals(rows)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(rows))
    console.print(_goals(found))
    console.print(f"Traces: {given.set}. Simulated in {time.monotonic() - began_s:.0f} s.")
    if given.keep:
        body = {
            "machine": machine(gpu="simulated: not measured on a GPU"),
            "set": given.set,
            "warm_up_s": WARM_UP_S,
            "goals": [{**asdict(goal), "met": goal.met} for goal in found],
            "rows": [asdict(row) for row in rows],
            "traces": [_trace(run) for run in runs],
        }
        name = "energy-unprofiled" if given.set == HELD_OUT else f"energy-unprofiled-{given.set}"
        path = RESULTS / f"{body['machine']['date']}-{name}.json"
        path.write_text(json.dumps(body, indent=1) + "\n")
        console.print(f"kept in {path}")


def drawn_runs(chosen: str, count: int) -> Iterator[Run]:
    """Yield the runs of a set: `count` for each wave on each kind of sensor."""
    chance = random.Random(SEEDS[chosen])
    for kind in KINDS:
        for wave in WAVES:
            for _ in range(count):
                curve = drawn(wave, chance)
                yield Run(kind, wave, curve, round(chance.uniform(0.0, kind.latest_s), 4), chance.randrange(10**9))


def judge(runs: Sequence[Run]) -> list[Row]:
    """Simulate all runs; for each kind of sensor and length, return a row per wave and a row for all waves."""
    found: dict[tuple[str, float], dict[str, list[Judged]]] = {}
    for run in runs:
        for length_s in LENGTHS_S:
            windows = run.windows(length_s, lag_is_known=False)
            known = run.windows(length_s, lag_is_known=True)
            waves = found.setdefault((run.kind.name, length_s), {})
            waves.setdefault(run.wave, []).extend(map(_judged, windows, known))
    rows = []
    for (sensor, length_s), waves in found.items():
        rows += [_row(sensor, wave, length_s, {wave: judged}) for wave, judged in waves.items()]
        rows.append(_row(sensor, ALL, length_s, waves))
    return rows


def _judged(one: MeasuredWindow, known: MeasuredWindow) -> Judged:
    return Judged(
        error=abs(one.error_j) / one.truth_j,
        half_width=NORMAL_95 * one.deviation_j / one.truth_j,
        known_error=abs(known.error_j) / known.truth_j,
        known_half_width=NORMAL_95 * known.deviation_j / known.truth_j,
    )


def _row(sensor: str, wave: str, length_s: float, waves: dict[str, list[Judged]]) -> Row:
    every = [one for judged in waves.values() for one in judged]
    error = statistics.median(one.error for one in every)
    half_width = statistics.median(one.half_width for one in every)
    known_error = statistics.median(one.known_error for one in every)
    known_half_width = statistics.median(one.known_half_width for one in every)
    needed = [_min_half_width(judged) for judged in waves.values() for _ in judged]
    return Row(
        sensor=sensor,
        wave=wave,
        length_s=length_s,
        windows=len(every),
        covered=statistics.fmean(one.error <= one.half_width for one in every),
        median_error=error,
        median_half_width=half_width,
        ratio=half_width / error,
        needed_ratio=statistics.median(needed) / error,
        known_covered=statistics.fmean(one.known_error <= one.known_half_width for one in every),
        known_median_error=known_error,
        known_median_half_width=known_half_width,
        known_ratio=known_half_width / known_error,
    )


def _min_half_width(judged: Sequence[Judged]) -> float:
    return sorted(one.error for one in judged)[math.ceil(MIN_GROUP * len(judged)) - 1]


def goals(rows: Sequence[Row]) -> list[Goal]:
    groups = [row for row in rows if row.wave != ALL]
    pools = [row for row in rows if row.wave == ALL]
    overall = sum(row.covered * row.windows for row in groups) / sum(row.windows for row in groups)
    lowest = min(groups, key=lambda row: row.covered)
    name = f"truth in the interval, lowest group: {lowest.wave}, {lowest.sensor}, {lowest.length_s:g} s"
    return [
        Goal("truth in the interval, all", overall, MIN_OVERALL, 1.0),
        Goal(name, lowest.covered, MIN_GROUP, 1.0),
        *(Goal(f"half-width over error, {row.sensor}, {row.length_s:g} s", row.ratio, 0.0, MAX_RATIO) for row in pools),
    ]


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="Windows after five minutes: median error and half-width in %", padding=(0, 1))
    names = ("sensor", "length", "wave", "within", "error", "±", "ratio", "needed", "lag known: ±", "ratio")
    for name in names:
        table.add_column(name, justify="left" if name in ("sensor", "wave") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.sensor,
            f"{row.length_s:g} s",
            row.wave,
            f"{row.covered * 100:.1f}",
            f"{row.median_error * 100:.4f}",
            f"{row.median_half_width * 100:.3f}",
            f"{row.ratio:.1f}",
            f"{row.needed_ratio:.1f}",
            f"{row.known_median_half_width * 100:.3f}",
            f"{row.known_ratio:.1f}",
            end_section=row.wave == ALL,
        )
    return table


def _goals(found: Sequence[Goal]) -> Table:
    table = Table(title="Goals", padding=(0, 1))
    table.add_column("figure")
    for name in ("measured", "from", "to", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for goal in found:
        verdict = "met" if goal.met else "not met"
        table.add_row(goal.name, f"{goal.value:.3f}", f"{goal.lowest:g}", f"{goal.highest:g}", verdict)
    return table


def _trace(run: Run) -> dict[str, object]:
    return {
        "sensor": run.kind.name,
        "wave": run.wave,
        "power": str(run.curve),
        "lag_s": run.lag_s,
        "seed": run.seed,
    }


if __name__ == "__main__":
    main()
