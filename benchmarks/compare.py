"""The share of identical configurations that a comparison calls different, and the share of differences that it finds.

Runs are simulated: a run has 180 windows of 1 % noise (sd) with autocorrelation, and its mean differs from the mean of
its configuration by the spread between runs. On the same data: a Mann-Whitney test on windows (benchstat's test),
Welch's test on windows (hyperfine's script), and a fixed limit of 3 % (TraceML's rule, which has a second limit of
8 %). ``python -m benchmarks.compare --keep`` writes benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import signal, special, stats

from benchmarks.figure import Figure
from benchmarks.machine import machine
from effllm.analysis.always_valid import always_valid, pairs, switchback, these_two_runs, while_running
from effllm.analysis.difference import (
    ALPHA,
    BETTER,
    SAME,
    UNKNOWN,
    WORDS,
    WORSE,
    Numbers,
    RunSpread,
    detectable,
    difference,
    holm,
    spread_of,
    word,
)

RESULTS = Path(__file__).parent / "results"
WINDOWS, NOISE, METRICS, LEDGER, RUNS = 180, 1.0, 20, 10, 10
LOOK_EVERY = 10  # windows
EFFECT = 2.0  # percent
LARGEST_FALSE = 0.07  # goal for the upper bound of the share called different
#: Autocorrelation of the windows, and standard deviation between runs in percent.
LINES = ((0, 0), (0.5, 0), (0.8, 0), (0.5, 0.2), (0.5, 0.5), (0.5, 1), (0.8, 0.2), (0.8, 1), (0, 1))


class Pair(NamedTuple):
    """Values of two configurations: A, B and the ledger as metrics x runs x windows."""

    a: Numbers
    b: Numbers
    ledger: Numbers


@dataclass
class Words:
    """The words of one method about many pairs."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORDS, 0))

    def add(self, word: str) -> None:
        self.counts[word] += 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def different(self) -> int:
        return self.counts[BETTER] + self.counts[WORSE]

    def share(self, word: str) -> float:
        return self.counts[word] / self.total


def upper_bound(count: int, total: int) -> float:
    """Return the upper limit of the two-sided 95 % interval of a share (Clopper and Pearson)."""
    return 1.0 if count >= total else float(special.betaincinv(count + 1, total - count, 0.975))


def simulate(
    count: int, correlation: float, spread: float, effect: float = 0.0, metrics: int = 1, seed: int = 1
) -> Iterator[Pair]:
    """Yield pairs of configurations; ``effect`` is the difference of the first metric, in percent."""
    random = np.random.default_rng([seed, int(100 * correlation), int(100 * spread), int(100 * effect), metrics])
    for _ in range(count):
        runs = _runs(random, (metrics, 2 * RUNS + LEDGER), correlation, spread)
        runs[0, RUNS : 2 * RUNS] += effect
        yield Pair(runs[:, :RUNS], runs[:, RUNS : 2 * RUNS], runs[:, 2 * RUNS :])


def _runs(random: np.random.Generator, shape: tuple[int, ...], correlation: float, spread: float) -> Numbers:
    start = random.normal(0.0, NOISE, (*shape, 1))  # the process is stationary from the first window on
    steps = random.normal(0.0, NOISE * np.sqrt(1 - correlation**2), (*shape, WINDOWS - 1))
    noise = np.concatenate([start, steps], axis=-1)
    if correlation:
        noise = signal.lfilter([1.0], [1.0, -correlation], noise, axis=-1)
    return np.asarray(100.0 + random.normal(0.0, spread, (*shape, 1)) + noise)


def _means(windows: Numbers, runs: int) -> list[float]:
    return [float(mean) for mean in windows[:runs].mean(axis=-1)]


def _ledger(windows: Numbers) -> RunSpread | None:
    return spread_of([_means(windows, LEDGER)])


def _word_of(estimate: float, p: float) -> str:
    return word(estimate, p, higher_is_better=True)


def by_runs(pair: Pair, runs: int, *, has_ledger: bool) -> str:
    """effllm: one metric named in advance."""
    ledger = _ledger(pair.ledger[0]) if has_ledger else None
    found = difference(_means(pair.a[0], runs), _means(pair.b[0], runs), ledger)
    return UNKNOWN if found is None else _word_of(found.estimate, found.p)


def by_holm(pair: Pair, runs: int, *, first: bool) -> str:
    """effllm: all metrics; the word of the first metric, or whether any metric is called different."""
    sides = zip(pair.a, pair.b, strict=True)
    found = [difference(_means(a, runs), _means(b, runs)) for a, b in sides]
    adjusted = holm([1.0 if one is None else one.p for one in found])
    words = [_word_of(one.estimate, p) if one else UNKNOWN for one, p in zip(found, adjusted, strict=True)]
    if first:
        return words[0]
    return next((one for one in words if one in (BETTER, WORSE)), SAME)


def by_looking_at_windows(pair: Pair) -> str:
    """effllm: a running run of B against one run of A, looked at every `LOOK_EVERY` windows until it is called."""
    ledger = _ledger(pair.ledger[0])
    assert ledger is not None
    reference, windows = _means(pair.a[0], 1), [float(value) for value in pair.b[0, 0]]
    for count in range(LOOK_EVERY, WINDOWS + 1, LOOK_EVERY):
        if (interval := while_running(windows[:count], reference, ledger)).excludes_zero:
            return _word_of(interval.estimate, 0.0)
    return SAME


def by_looking_at_runs(pair: Pair) -> str:
    """effllm: a campaign, looked at after every pair of runs until it is called."""
    a, b = _means(pair.a[0], RUNS), _means(pair.b[0], RUNS)
    for runs in range(2, RUNS + 1):
        if (interval := pairs(a[:runs], b[:runs])).excludes_zero:
            return _word_of(interval.estimate, 0.0)
    return SAME


def these_two(pair: Pair) -> str:
    """The interval of these two runs, read as a statement about the configurations, which effllm does not print."""
    found = these_two_runs(pair.a[0, 0].tolist(), pair.b[0, 0].tolist())
    return UNKNOWN if found is None else _word_of(found.estimate, found.p)


def mann_whitney(pair: Pair, *, metrics: int = 1) -> str:
    p = stats.mannwhitneyu(pair.a[:metrics, 0], pair.b[:metrics, 0], axis=-1).pvalue
    return _any_word(pair, p)


def mann_whitney_looking(pair: Pair) -> str:
    for count in range(LOOK_EVERY, WINDOWS + 1, LOOK_EVERY):
        cut = Pair(pair.a[:1, :, :count], pair.b[:1, :, :count], pair.ledger)
        if (word := mann_whitney(cut)) != SAME:
            return word
    return SAME


def welch_on_windows(pair: Pair) -> str:
    return _any_word(pair, stats.ttest_ind(pair.a[:1, 0], pair.b[:1, 0], axis=-1, equal_var=False).pvalue)


def _any_word(pair: Pair, p: Any) -> str:
    place = int(np.argmin(p))
    return _word_of(float(pair.b[place, 0].mean() - pair.a[place, 0].mean()), float(p[place]))


def fixed_limit(pair: Pair) -> str:
    share = float(np.median(pair.b[0, 0]) / np.median(pair.a[0, 0]) - 1)
    return SAME if abs(share) < 0.03 else _word_of(share, 0.0)


Method = Callable[[Pair], str]
OURS: dict[str, Method] = {
    "effllm 1+1, no ledger": partial(by_runs, runs=1, has_ledger=False),
    "effllm 1+1, ledger": partial(by_runs, runs=1, has_ledger=True),
    "effllm 2+2": partial(by_runs, runs=2, has_ledger=False),
    "effllm 2+2, ledger": partial(by_runs, runs=2, has_ledger=True),
    "effllm 3+3": partial(by_runs, runs=3, has_ledger=False),
    "effllm 3+3, ledger": partial(by_runs, runs=3, has_ledger=True),
    "effllm 5+5": partial(by_runs, runs=5, has_ledger=False),
    "effllm, a running run looked at 18 times, ledger": by_looking_at_windows,
    "effllm, a campaign looked at 9 times": by_looking_at_runs,
}
OTHERS: dict[str, Method] = {
    "Mann-Whitney on windows": mann_whitney,
    "Mann-Whitney on windows, 18 looks": mann_whitney_looking,
    "Welch on windows": welch_on_windows,
    "fixed limit of 3 %": fixed_limit,
    "these two runs only (batch means)": these_two,
}
OF_MANY: dict[str, Method] = {
    f"effllm 3+3, any of {METRICS} metrics": partial(by_holm, runs=3, first=False),
    f"effllm 5+5, any of {METRICS} metrics": partial(by_holm, runs=5, first=False),
    f"Mann-Whitney on windows, any of {METRICS} metrics": partial(mann_whitney, metrics=METRICS),
}


def words_of(methods: dict[str, Method], drawn: Iterator[Pair]) -> dict[str, Words]:
    found = {name: Words() for name in methods}
    for pair in drawn:
        for name, method in methods.items():
            found[name].add(method(pair))
    return found


def of_line(count: int, seed: int, line: tuple[float, float]) -> dict[str, Words]:
    """Compare identical configurations in one line of the table."""
    found = words_of({**OURS, **OTHERS}, simulate(count, *line, seed=seed))
    return found | words_of(OF_MANY, simulate(count, *line, metrics=METRICS, seed=seed))


def false_words(count: int, seed: int, pool: ProcessPoolExecutor) -> tuple[list[Figure], dict[str, dict[str, Words]]]:
    """Compare identical configurations in every line of the table."""
    figures, table = [], {}
    for (correlation, spread), found in zip(LINES, pool.map(partial(of_line, count, seed), LINES), strict=True):
        line = f"autocorrelation {correlation}, sd between runs {spread} %"
        table[line] = found
        for name, words in found.items():
            goal = LARGEST_FALSE if name.startswith("effllm") else None
            upper = upper_bound(words.different, words.total)
            detail = {"called_different": words.different, "pairs": words.total, "words": words.counts}
            figures.append(
                Figure(f"{name}: called different, upper bound; {line}", upper, "share", goal, detail=detail)
            )
    return figures, table


def found_words(count: int, seed: int, correlation: float) -> dict[str, Words]:
    """Compare configurations that differ by 2 %, with a spread between runs of 0.5 %."""
    found = words_of({**OURS, **OTHERS}, simulate(count, correlation, 0.5, EFFECT, seed=seed))
    of_many = {f"effllm 5+5, the first of {METRICS} metrics": partial(by_holm, runs=5, first=True)}
    return found | words_of(of_many, simulate(count, correlation, 0.5, EFFECT, METRICS, seed))


def power(count: int, seed: int, pool: ProcessPoolExecutor) -> tuple[list[Figure], dict[str, Words]]:
    """Return the shares of differences that were not found; the words are those of uncorrelated windows.

    With an autocorrelation of 0.8, the noise of the windows raises the spread of the run means from 0.5 to 0.55 %.
    """
    goals = {"effllm 3+3": 0.15, "effllm 3+3, ledger": 0.08, f"effllm 5+5, the first of {METRICS} metrics": 0.20}
    figures, correlations = [], (0, 0.5, 0.8)
    tables = list(pool.map(partial(found_words, count, seed), correlations))
    for correlation, found in zip(correlations, tables, strict=True):
        for name, words in found.items():
            goal = goals.get(name) if correlation < 0.8 else None
            title = f"{name}: +2 % not found; autocorrelation {correlation}"
            figures.append(Figure(title, 1 - words.share(BETTER), "share", goal, detail={"words": words.counts}))
    return figures, tables[0]


def effects(count: int) -> list[Figure]:
    """Compare the stated minimum detectable effect with the effect that is found in 80 % of experiments."""
    figures = []
    for runs in (2, 3, 5):
        for has_ledger in (False, True):
            random = np.random.default_rng([runs, has_ledger])
            sd_truth = _found_in_80_percent(random, runs, has_ledger, count)
            stated = np.array([_stated(random, runs, has_ledger) for _ in range(count)])
            shares = stated / sd_truth
            detail = {
                "truth_sd": sd_truth,
                "median_stated_sd": float(np.median(stated)),
                "within_a_quarter": float(np.mean((shares > 0.75) & (shares < 1.25))),
                "quantiles_5_95": [float(one) for one in np.quantile(shares, [0.05, 0.95])],
            }
            name = f"{runs}+{runs}{', ledger' if has_ledger else ''}: error of the median stated detectable effect"
            figures.append(Figure(name, abs(float(np.median(shares)) - 1), "share", 0.25, detail=detail))
    return figures


def _draw(random: np.random.Generator, runs: int, effect: float = 0.0) -> tuple[list[float], list[float], list[float]]:
    a, b, ledger = random.normal(0, 1, runs), random.normal(effect, 1, runs), random.normal(0, 1, LEDGER)
    return a.tolist(), b.tolist(), ledger.tolist()


def _stated(random: np.random.Generator, runs: int, has_ledger: bool) -> float:
    a, b, ledger = _draw(random, runs)
    spread = spread_of([a, b, *([ledger] if has_ledger else [])])
    assert spread is not None
    stated = detectable(spread, runs, runs, LEDGER - 1 if has_ledger else 0)
    assert stated is not None
    return stated


def _found_in_80_percent(random: np.random.Generator, runs: int, has_ledger: bool, count: int) -> float:
    low, high = 0.5, 16.0
    for _ in range(9):
        effect, found = (low + high) / 2, 0
        for _ in range(count):
            a, b, ledger = _draw(random, runs, effect)
            one = difference(a, b, spread_of([ledger]) if has_ledger else None)
            found += one is not None and one.p <= ALPHA
        low, high = (effect, high) if found < 0.8 * count else (low, effect)
    return high


def wrong_assumptions(count: int) -> list[Figure]:
    """Identical means, but spreads that differ between the sides, or from the ledger: no goal."""
    figures = []
    for runs in (1, 2, 3, 5):
        for name, scale_a, scale_b, has_ledger in (
            ("B varies 3 times as much as A", 1, 3, False),
            ("B varies 3 times as much as A, ledger of A", 1, 3, True),
            ("A and B vary twice as much as the ledger", 2, 2, True),
        ):
            if runs == 1 and not has_ledger:
                continue
            random = np.random.default_rng([runs, scale_b, has_ledger])
            false = 0
            for _ in range(count):
                a, b, ledger = _draw(random, runs)
                sides = [scale_a * one for one in a], [scale_b * one for one in b]
                found = difference(*sides, spread_of([ledger]) if has_ledger else None)
                false += found is not None and found.p <= ALPHA
            figures.append(Figure(f"{runs}+{runs}, {name}: called different", false / count, "share"))
    return figures


def inside_one_run(count: int) -> list[Figure]:
    """Switch a knob inside one run in ABBA blocks of 20 windows a segment, with a drift of 2 % over the run."""
    figures = []
    for effect in (0.0, 0.5):
        called = {"ABBA blocks, looked at after each block": 0, "first half A, second half B, Welch on windows": 0}
        for pair in simulate(count, 0.5, 0.5):
            windows = np.concatenate([pair.a[0, 0], pair.a[0, 1], pair.a[0, 2], pair.a[0, 3]]) - 100.0
            windows = windows - np.repeat([one.mean() for one in np.split(windows, 4)], WINDOWS)  # one run, one mean
            windows += np.linspace(-1.0, 1.0, len(windows))
            arms = ["ABBA"[at // 20 % 4] for at in range(len(windows))]
            values = windows + effect * np.array([arm == "B" for arm in arms])
            blocks = switchback(arms, values.tolist(), "A", "B", settle=1)
            looks = (always_valid(blocks[:seen]).excludes_zero for seen in range(2, len(blocks) + 1))
            called["ABBA blocks, looked at after each block"] += any(looks)
            first, second = np.split(windows, 2)
            p = stats.ttest_ind(first, second + effect, equal_var=False).pvalue
            called["first half A, second half B, Welch on windows"] += p <= ALPHA
        for name, times in called.items():
            goal = LARGEST_FALSE if name.startswith("ABBA") and not effect else None
            value = upper_bound(times, count) if not effect else times / count
            what = "called different, upper bound" if not effect else f"+{effect} % called different"
            figures.append(Figure(f"inside one run, {name}: {what}", value, "share", goal))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the figures in benchmarks/results/")
    parser.add_argument("--pairs", type=int, default=3000, help="pairs per line of the table")
    parser.add_argument("--seed", type=int, default=1, help="of the tables; the kept figures have the seed 1")
    arguments = parser.parse_args()
    start_s = time.monotonic()
    with ProcessPoolExecutor(2) as pool:
        figures, table = false_words(arguments.pairs, arguments.seed, pool)
        powers, found = power(arguments.pairs, arguments.seed, pool)
    figures += powers + effects(arguments.pairs) + wrong_assumptions(arguments.pairs) + inside_one_run(arguments.pairs)
    _print_tables(table, found)
    for figure in figures:
        if figure.goal is not None and not figure.met:
            print(f"MISSED: {figure.name}: {figure.value:.3f}, goal {figure.goal}")
    for figure in figures:
        if "called different, upper bound; auto" not in figure.name and ("not found" not in figure.name or figure.goal):
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


def _print_tables(table: dict[str, dict[str, Words]], found: dict[str, Words]) -> None:
    print("Identical configurations, percent called different; columns: autocorrelation / sd between runs in percent")
    print(" " * 52 + "".join(f"{f'{correlation}/{spread}':>9}" for correlation, spread in LINES))
    for name in next(iter(table.values())):
        shares = (100 * words[name].different / words[name].total for words in table.values())
        print(f"{name:52}" + "".join(f"{share:9.1f}" for share in shares))
    print("\nB is 2 % better, sd between runs 0.5 %, percent of the four words")
    for name, words in found.items():
        print(f"{name:52}" + "  ".join(f"{word} {100 * words.share(word):.1f}" for word in WORDS))
    print()


if __name__ == "__main__":
    sys.exit(main())
