"""Compare the cost of two commits by paired runs: ``python -m benchmarks.paired OTHER_CLONE [recorder scale ...]``.

In each round every benchmark runs once with each clone, in a random order, with this interpreter.  A figure is the
geometric mean of the ratios, this clone over the other, with its 95 % interval; a figure whose whole interval is above
1.05 is slower.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]
SLOWER = 1.05
UNITS = ("ns", "us", "ms", "s", "MB", "MiB", "%", "ratio")  # a smaller figure is better; others are counts
#: Benchmark -> code that runs in a clone and leaves the list `figures`.
CODES = {
    **{
        name: f"from benchmarks import {name}; figures = {name}.measure()"
        for name in ("recorder", "instruments", "importing", "latency", "agent", "sampling", "training")
    },
    "scale": """
from benchmarks.figure import Figure
from effllm.commands.simulate_run import SimulatedRun, Simulation
from effllm.config.settings import Config
figures = []
for ranks in (1_000, 10_000):
    run = SimulatedRun(Simulation(ranks, minutes=10 / 60, arrival="burst", security="curve"), Config()).measure()
    delay_s = sorted(run.delays_s)[len(run.delays_s) // 2]
    figures += [
        Figure(f"{ranks:,} ranks: processor time of a report", run.cpu_us_per_report, "us"),
        Figure(f"{ranks:,} ranks: memory", run.rss_bytes / 2**20, "MiB"),
        Figure(f"{ranks:,} ranks: from the last report to the values, median", delay_s, "s"),
    ]
""",
    "look": """
import tempfile
from pathlib import Path
from benchmarks import look
with tempfile.TemporaryDirectory() as name:
    run = look.large_run(Path(name) / "large", 8192, 30)
    lines_ms = look.render_ms(Path(name) / "large")
    top = look.of_top(Path(name) / "large", run)
    run.close()
figures = look.figures_of(top, lines_ms, {name: {"why": "other tools are not run"} for name in ("nvitop", "LEET")})
""",
    "fleets": """
import tempfile
from pathlib import Path
from benchmarks import look
with tempfile.TemporaryDirectory() as name:
    figures = look._of_fleets({count: look.of_fleet(Path(name) / f"jobs-{count}", count) for count in (1, look.JOBS)})
""",
}
PRINT = "\nimport json; print('FIGURES', json.dumps([(one.name, one.unit, one.value) for one in figures]))"


def main() -> int:
    """Measure, print a table, and return 1 if a figure is slower."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paired", description=__doc__)
    parser.add_argument("other", type=Path, help="clone of the commit to compare with")
    parser.add_argument("names", nargs="*", help=f"benchmarks, by default all: {', '.join(CODES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the figures in benchmarks/results/")
    given = parser.parse_args()
    sides = {"this": ROOT, "other": given.other.resolve()}
    values: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    chance = random.Random(given.seed)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C prints what has been measured
        for number, name in itertools.product(range(given.rounds), given.names or CODES):
            measured = {side: _run(sides[side], name) for side in chance.sample(list(sides), 2)}
            for key in measured["this"].keys() & measured["other"].keys():
                for side, found in measured.items():
                    values.setdefault((name, *key), {}).setdefault(side, []).append(found[key])
            print(f"round {number + 1} of {given.rounds}: {name}", file=sys.stderr)
    rows = [_row(key, pair) for key, pair in sorted(values.items())]
    _print(rows, given.rounds)
    if given.keep:
        commits = {side: _commit(folder) for side, folder in sides.items()}
        about = machine(command="python -m benchmarks.paired", load=os.getloadavg()[0], commits=commits)
        path = ROOT / "benchmarks" / "results" / f"{'-'.join([about['date'], 'paired', *given.names])}.json"
        path.write_text(json.dumps({"machine": about, "rounds": given.rounds, "figures": rows}, indent=2) + "\n")
    return int(any(row["interval"][0] > SLOWER for row in rows))


def _run(clone: Path, name: str) -> dict[tuple[str, str], float]:
    """Return the figures of a benchmark with a clone that are costs, by name and unit."""
    environ = {**os.environ, "PYTHONPATH": str(clone)}
    with tempfile.TemporaryDirectory() as folder:
        environ["HOME"] = folder
        done = subprocess.run(
            [sys.executable, "-c", CODES[name] + PRINT],
            cwd=clone,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
    line = next((line for line in done.stdout.splitlines() if line.startswith("FIGURES ")), None)
    if line is None:
        sys.exit(f"{clone}: {name} has no figures: {done.stderr[-2000:]}")
    figures = json.loads(line.removeprefix("FIGURES "))
    return {(figure, unit): value for figure, unit, value in figures if value and value > 0 and unit in UNITS}


def _row(key: tuple[str, str, str], pair: dict[str, list[float]]) -> dict[str, Any]:
    """Return a figure of both sides with the mean ratio and its interval."""
    logs = [math.log(this / other) for this, other in zip(pair["this"], pair["other"], strict=True)]
    mean, half = statistics.fmean(logs), math.inf
    if len(logs) > 1:
        half = float(student.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    medians = {side: statistics.median(numbers) for side, numbers in pair.items()}
    limits = (math.exp(mean - half), math.exp(mean + half) if half < math.inf else math.inf)
    return {"benchmark": key[0], "name": key[1], "unit": key[2], **medians, "ratio": math.exp(mean), "interval": limits}


def _print(rows: list[dict[str, Any]], rounds: int) -> None:
    table = Table("figure", "other", "this", "ratio", "95 %", title=f"{rounds} rounds")
    for row in rows:
        low, high = row["interval"]
        word = " slower" if low > SLOWER else ""
        numbers = (f"{row['other']:.4g} {row['unit']}", f"{row['this']:.4g}", f"{row['ratio']:.3f}")
        table.add_row(f"{row['benchmark']}: {row['name']}", *numbers, f"{low:.3f} to {high:.3f}{word}")
    Console(width=120).print(table)


def _commit(clone: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=clone, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
