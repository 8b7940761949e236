"""The share of identical configurations that a comparison calls different, and the share of differences that it finds.

Runs are simulated: a run has 180 windows of 1 % noise (sd) with autocorrelation, and its mean differs from the mean of
its configuration by the spread between runs. Each quantity of the table of `effllm compare` has its own noise. On the
same data: a Mann-Whitney test on windows (benchstat's test), Welch's test on windows (hyperfine's script), and a fixed
limit of 3 % (TraceML's rule, which has a second limit of 8 %). ``python -m benchmarks.compare --keep`` writes
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import signal, special, stats

from benchmarks.figure import Figure
from benchmarks.machine import machine
from effllm.analysis.compared_metrics import compared_metrics
from effllm.analysis.comparison import ALPHA, BETTER, OUTCOMES, POWER, SAME, WORSE, compare, difference
from effllm.analysis.sides import ComparedRun, Side

RESULTS = Path(__file__).parent / "results"
WINDOWS, NOISE, RUNS = 180, 1.0, 5
EFFECT = 2.0  # percent
PROMISED = 0.06  # share of identical configurations that a table calls different
#: Autocorrelation of the windows, and standard deviation between runs in percent.
LINES = ((0, 0), (0.5, 0.2), (0.5, 0.5), (0.8, 1), (0, 1))
#: One metric of each quantity of the table, of which the first is the primary.
METRICS = list({one.quantity: one for one in reversed(compared_metrics())}.values())[::-1]

Numbers = NDArray[np.float64]


class Pair(NamedTuple):
    """Values of two configurations, A and B, as metrics x runs x windows."""

    a: Numbers
    b: Numbers


@dataclass
class Outcomes:
    """The outcomes of one method about many pairs."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))

    def add(self, outcome: str) -> None:
        self.counts[outcome] += 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def different(self) -> int:
        return self.counts[BETTER] + self.counts[WORSE]

    def share(self, outcome: str) -> float:
        return self.counts[outcome] / self.total


def bounds(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Clopper and Pearson)."""
    low = float(special.betaincinv(count, total - count + 1, 0.025)) if count else 0.0
    return low, 1.0 if count >= total else float(special.betaincinv(count + 1, total - count, 0.975))


def simulate(count: int, correlation: float, spread: float, effect: float = 0.0, seed: int = 1) -> Iterator[Pair]:
    """Yield pairs of configurations; ``effect`` is the difference of the primary metric, in percent."""
    random = np.random.default_rng([seed, int(100 * correlation), int(100 * spread), int(100 * effect)])
    for _ in range(count):
        runs = _runs(random, (len(METRICS), 2 * RUNS), correlation, spread)
        runs[0, RUNS:] += effect
        yield Pair(runs[:, :RUNS], runs[:, RUNS:])


def _runs(random: np.random.Generator, shape: tuple[int, ...], correlation: float, spread: float) -> Numbers:
    start = random.normal(0.0, NOISE, (*shape, 1))  # the process is stationary from the first window on
    steps = random.normal(0.0, NOISE * np.sqrt(1 - correlation**2), (*shape, WINDOWS - 1))
    noise = np.concatenate([start, steps], axis=-1)
    if correlation:
        noise = signal.lfilter([1.0], [1.0, -correlation], noise, axis=-1)
    return np.asarray(100.0 + random.normal(0.0, spread, (*shape, 1)) + noise)


def outcomes(pair: Pair) -> dict[str, str]:
    """Return the outcome of each method about a pair."""
    found = {}
    for runs in (1, 2, 3, 5):
        rows = compare(_side("A", pair.a, runs), _side("B", pair.b, runs), METRICS)
        primary, *others = (str(row.outcome) for row in rows)
        found[f"effllm {runs}+{runs}, primary"] = primary
        found[f"effllm {runs}+{runs}, any in the table"] = next(
            (one for one in (primary, *others) if one in (BETTER, WORSE)), primary
        )
    found["Mann-Whitney on windows"] = mann_whitney(pair)
    found[f"Mann-Whitney on windows, any of {len(METRICS)} metrics"] = mann_whitney(pair, len(METRICS))
    p = stats.ttest_ind(pair.a[:1, 0], pair.b[:1, 0], axis=-1, equal_var=False).pvalue
    found["Welch on windows"] = _any_outcome(pair, p)
    share = float(np.median(pair.b[0, 0]) / np.median(pair.a[0, 0]) - 1)
    found["fixed limit of 3 %"] = SAME if abs(share) < 0.03 else BETTER if share > 0 else WORSE
    return found


def _side(name: str, windows: Numbers, runs: int) -> Side:
    values = windows[:, :runs].mean(axis=-1).T
    rows = [dict(zip([one.column for one in METRICS], map(float, of_run), strict=True)) for of_run in values]
    return Side(name, tuple(ComparedRun(Path(name), {**row, "is_over": True}) for row in rows))


def mann_whitney(pair: Pair, metrics: int = 1) -> str:
    return _any_outcome(pair, stats.mannwhitneyu(pair.a[:metrics, 0], pair.b[:metrics, 0], axis=-1).pvalue)


def _any_outcome(pair: Pair, p: Any) -> str:
    place = int(np.argmin(p))
    if p[place] > ALPHA:
        return SAME
    return BETTER if pair.b[place, 0].mean() > pair.a[place, 0].mean() else WORSE


def outcomes_of(count: int, seed: int, line: tuple[float, float], effect: float = 0.0) -> dict[str, Outcomes]:
    """Return the outcomes of all methods about the pairs of one line of the table."""
    found: dict[str, Outcomes] = {}
    for pair in simulate(count, *line, effect, seed):
        for name, outcome in outcomes(pair).items():
            found.setdefault(name, Outcomes()).add(outcome)
    return found


def false_outcomes(
    count: int, seed: int, pool: ProcessPoolExecutor
) -> tuple[list[Figure], dict[str, dict[str, Outcomes]]]:
    """Compare identical configurations in every line of the table; a goal is missed if the promise is refuted."""
    figures, table = [], {}
    found_by_line = pool.map(partial(outcomes_of, count, seed), LINES)
    for (correlation, spread), found in zip(LINES, found_by_line, strict=True):
        line = f"autocorrelation {correlation}, sd between runs {spread} %"
        table[line] = found
        for name, counted in found.items():
            goal = PROMISED if name.startswith("effllm") else None
            low, high = bounds(counted.different, counted.total)
            detail = {"called_different": counted.different, "upper_bound": high, "outcomes": counted.counts}
            figures.append(Figure(f"{name}: called different, lower bound; {line}", low, "share", goal, detail=detail))
    return figures, table


def power(count: int, seed: int, pool: ProcessPoolExecutor) -> tuple[list[Figure], dict[str, Outcomes]]:
    """Return the shares of differences of 2 % that are not found, with a spread between runs of 0.5 %.

    With an autocorrelation of 0.8, the noise of the windows raises the spread of the run means from 0.5 to 0.55 %. The
    returned outcomes are those of uncorrelated windows.
    """
    figures, correlations = [], (0, 0.5, 0.8)
    lines = [(correlation, 0.5) for correlation in correlations]
    tables = list(pool.map(partial(outcomes_of, count, seed, effect=EFFECT), lines))
    for correlation, found in zip(correlations, tables, strict=True):
        for name, counted in found.items():
            goal = 0.175 if name == "effllm 3+3, primary" and correlation < 0.8 else None
            title = f"{name}: +2 % not found; autocorrelation {correlation}"
            figures.append(Figure(title, 1 - counted.share(BETTER), "share", goal, detail={"outcomes": counted.counts}))
    return figures, tables[0]


def effects(count: int) -> list[Figure]:
    """Compare the stated minimum detectable effect with the effect that is found in 80 % of experiments."""
    figures = []
    for runs in (2, 3, 5):
        random = np.random.default_rng(runs)
        true_sd = _found_in_80_percent(random, runs, count)
        stated = [found.detectable() for _ in range(count) if (found := _draw(random, runs)) is not None]
        shares = np.array(stated) / true_sd
        detail = {
            "truth_sd": true_sd,
            "within_a_quarter": float(np.mean((shares > 0.75) & (shares < 1.25))),
            "quantiles_5_95": [float(one) for one in np.quantile(shares, [0.05, 0.95])],
        }
        name = f"{runs}+{runs}: error of the median stated detectable effect"
        goal = 0.25 if runs > 2 else None
        figures.append(Figure(name, abs(float(np.median(shares)) - 1), "share", goal, detail=detail))
    return figures


def _draw(random: np.random.Generator, runs: int, effect: float = 0.0, scale_b: float = 1.0) -> Any:
    return difference(random.normal(0, 1, runs).tolist(), random.normal(effect, scale_b, runs).tolist())


def _found_in_80_percent(random: np.random.Generator, runs: int, count: int) -> float:
    low, high = 0.5, 16.0
    for _ in range(9):
        effect = (low + high) / 2
        found = sum(_draw(random, runs, effect).p <= ALPHA for _ in range(count))
        low, high = (effect, high) if found < POWER * count else (low, effect)
    return high


def different_spreads(count: int) -> list[Figure]:
    """Identical means, but B varies three times as much as A: no goal."""
    figures = []
    for runs in (2, 3, 5):
        random = np.random.default_rng([runs, 3])
        false = sum(_draw(random, runs, scale_b=3).p <= ALPHA for _ in range(count))
        figures.append(
            Figure(f"{runs}+{runs}, B varies 3 times as much as A: called different", false / count, "share")
        )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the figures in benchmarks/results/")
    parser.add_argument("--pairs", type=int, default=1000, help="pairs per line of the table")
    parser.add_argument("--seed", type=int, default=1, help="of the tables; the kept figures have the seed 1")
    arguments = parser.parse_args()
    start_s = time.monotonic()
    with ProcessPoolExecutor(2) as pool:
        figures, table = false_outcomes(arguments.pairs, arguments.seed, pool)
        powers, found = power(arguments.pairs, arguments.seed, pool)
    figures += powers + effects(arguments.pairs) + different_spreads(arguments.pairs)
    _print_tables(table, found)
    for figure in figures:
        if figure.goal is not None and not figure.met:
            print(f"MISSED: {figure.name}: {figure.value:.3f}, goal {figure.goal}")
    for figure in figures:
        if "called different, lower bound; auto" not in figure.name and ("not found" not in figure.name or figure.goal):
            print(f"{figure.value:8.3f}  {figure.name}  {_short(figure.detail)}")
    print(f"{time.monotonic() - start_s:.0f} s on two processes")
    if arguments.keep:
        document = {"machine": machine(pairs=arguments.pairs), "figures": [figure.to_dict() for figure in figures]}
        path = RESULTS / f"{time.strftime('%Y-%m-%d')}-compare.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(figure.met is False for figure in figures))


def _short(detail: dict[str, Any]) -> str:
    shown = {key: np.round(value, 2).tolist() for key, value in detail.items() if not isinstance(value, dict)}
    return json.dumps(shown) if shown else ""


def _print_tables(table: dict[str, dict[str, Outcomes]], found: dict[str, Outcomes]) -> None:
    print("Identical configurations, percent called different; columns: autocorrelation / sd between runs in percent")
    print(" " * 52 + "".join(f"{f'{correlation}/{spread}':>9}" for correlation, spread in LINES))
    for name in next(iter(table.values())):
        shares = (100 * line[name].different / line[name].total for line in table.values())
        print(f"{name:52}" + "".join(f"{share:9.1f}" for share in shares))
    print("\nB is 2 % better, sd between runs 0.5 %, percent of the four outcomes")
    for name, counted in found.items():
        print(f"{name:52}" + "  ".join(f"{outcome} {100 * counted.share(outcome):.1f}" for outcome in OUTCOMES))
    print()


if __name__ == "__main__":
    sys.exit(main())
