"""Planted causes against verdicts: confusion matrix and gains.  ``python -m benchmarks.verdict``.

Every job runs in virtual time through the aggregator; jobs with a planted cause also run for some seconds with real
processes, two at a time.  Finished jobs are kept in ``build/verdict``: an interrupted benchmark continues.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from benchmarks.planted.job import HEALTHY, NUM_HEALTHY, NUM_SEEDS, THRESHOLDS
from benchmarks.planted.real import run_real
from benchmarks.planted.reports import summary_of_planted
from benchmarks.planted.timeline import planned, timeline
from effllm.records.job import Summary
from tests.nvml_library import build

RESULTS, FINISHED = Path(__file__).parent / "results", Path("build/verdict")
VIRTUAL, REAL = "virtual", "real"
UNKNOWN, NONE_FOUND = "unknown", "none_found"
CONCURRENT = 2
MIN_RIGHT = 0.95
#: A gain may exceed its bound by this much: the rounding of the bound, in tokens per device time.
ROUNDING = 1e-6

Found = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdict", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds of each cause, ten healthy jobs")
    parser.add_argument("--fast-only", action="store_true", help="only virtual time: two minutes")
    parser.add_argument("--seeds", default=f"0-{NUM_SEEDS - 1}", help="first and last seed, such as 0-9")
    parser.add_argument("--healthy", default=f"0-{NUM_HEALTHY - 1}", help="first and last seed of healthy jobs")
    parser.add_argument("--causes", default=",".join(THRESHOLDS), help="planted causes, separated by commas")
    parser.add_argument("--again", action="store_true", help="run all jobs again, also finished jobs of this commit")
    parser.add_argument("--keep", action="store_true", help="write the results to benchmarks/results/")
    parser.add_argument("--markdown", action="store_true", help="print the confusion matrix as a table of Markdown")
    given = parser.parse_args()
    first, last = (0, 1) if given.quick else map(int, given.seeds.split("-"))
    causes, seeds = given.causes.split(","), range(first, last + 1)
    first, last = (0, 9) if given.quick else map(int, given.healthy.split("-"))
    healthy = range(first, last + 1)
    console, folder = Console(), FINISHED / _version()
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(VIRTUAL, cause, seed) for cause in causes for seed in seeds]
    jobs += [(VIRTUAL, HEALTHY, seed) for seed in healthy] if given.causes == ",".join(THRESHOLDS) else []
    with ProcessPoolExecutor(CONCURRENT) as pool:
        found = _all(pool, virtual, jobs, folder, given.again, console)
    if not given.fast_only:
        library = build(Path(tempfile.mkdtemp(prefix="effllm-nvml-")))
        real_jobs = [(REAL, cause, seed) for seed in seeds for cause in causes]
        with ThreadPoolExecutor(CONCURRENT) as pool:
            found += _all(pool, partial(real, library=library), real_jobs, folder, given.again, console)
    order = [*THRESHOLDS, HEALTHY]
    found.sort(key=lambda one: (order.index(one["planted"]), one["seed"]))
    for path in (VIRTUAL, REAL):
        if chosen := [one for one in found if one["path"] == path]:
            (print if given.markdown else console.print)(markdown(chosen) if given.markdown else table(chosen, path))
            console.print("\n".join(lines_of(chosen)))
    if given.keep:
        console.print(f"kept in {_keep(found)}")
    return 0


def virtual(cause: str, seed: int) -> Found:
    """Run a job in virtual time; the gain of the fix is the gain of the same job without the cause."""
    job = planned(cause, seed)
    course = timeline(job)
    began_s = time.monotonic()
    summary = summary_of_planted(course)
    found = _found(VIRTUAL, cause, seed, summary, course.shares, time.monotonic() - began_s)
    if job.causes and cause != HEALTHY:
        found["gain"] = course.device_seconds / timeline(job, fixed=cause).device_seconds - 1.0
    return found


def real(cause: str, seed: int, library: Path | None) -> Found:
    """Run a short job with real processes."""
    course = timeline(planned(cause, seed, is_short=True))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="effllm-planted-") as folder:
        summary = run_real(course, Path(folder), library)
    return _found(REAL, cause, seed, summary, course.shares, time.monotonic() - began_s)


def _found(path: str, cause: str, seed: int, summary: Summary, shares: dict[str, float], spent_s: float) -> Found:
    verdict, parts = summary.verdict, summary.waterfall.parts if summary.waterfall else ()
    return {
        "path": path, "planted": cause, "seed": seed, "cause": verdict.cause if verdict else UNKNOWN,
        "text": verdict.text if verdict else "", "why": verdict.why if verdict else "",
        "next": verdict.next if verdict else "", "bound": verdict.bound if verdict else None, "gain": None,
        "status": summary.status, "elapsed_s": round(summary.elapsed_s, 3), "spent_s": round(spent_s, 2),
        "planted_shares": {name: round(share, 4) for name, share in shares.items() if share >= 0.001},
        "waterfall": {part.name: round(part.share, 4) for part in parts},
    }  # fmt: skip


# --- running ---


def _all(
    pool: Executor,
    run: Callable[[str, int], Found],
    jobs: Iterable[tuple[str, str, int]],
    folder: Path,
    again: bool,
    console: Console,
) -> list[Found]:
    """Run the jobs that are not finished; a job that fails is printed and left out."""
    found, running = [], {}
    for path, cause, seed in jobs:
        file = folder / f"{path}-{cause}-{seed}.json"
        if file.exists() and not again:
            found.append(json.loads(file.read_text()))
        else:
            running[pool.submit(run, cause, seed)] = file
    with console.status(f"{len(running)} jobs"):
        for done in as_completed(running):
            file = running[done]
            try:
                result = done.result()
            except Exception as error:  # noqa: BLE001 - one failed job does not end the benchmark
                console.print(f"{file.stem} failed: {type(error).__name__}: {error}", markup=False)
                continue
            file.write_text(json.dumps(result) + "\n")
            found.append(result)
    return found


def _version() -> str:
    """Return the commit, with a mark if files are changed."""
    about = machine()
    changes = subprocess.run(["git", "diff", "HEAD"], capture_output=True, check=False).stdout
    return about["commit"] + (f"-{zlib.crc32(changes):x}" if about["changed"] else "")


def _keep(found: list[Found]) -> Path:
    about = machine(command="python -m benchmarks.verdict " + " ".join(sys.argv[1:]))
    path = RESULTS / f"{about['date']}-verdict.json"
    RESULTS.mkdir(exist_ok=True)
    ordered = sorted(found, key=lambda one: (one["path"], one["planted"], one["seed"]))
    lines = ",\n".join(json.dumps(one) for one in ordered)
    path.write_text(f'{{"machine": {json.dumps(about)},\n"jobs": [\n{lines}\n]}}\n')
    return path


# --- results ---


def is_right(one: Found) -> bool:
    """Whether a verdict is right: the planted cause, or no accusation of a healthy job."""
    return (
        one["cause"] == one["planted"] if one["planted"] != HEALTHY else one["cause"] in (HEALTHY, NONE_FOUND, UNKNOWN)
    )


def is_inside(one: Found) -> bool:
    """Whether the gain of the fix is within the stated bound."""
    return one["bound"] is not None and one["gain"] <= one["bound"] + ROUNDING


def matrix(found: list[Found]) -> dict[str, Counter[str]]:
    """Return the number of jobs by planted cause and by verdict."""
    counts: dict[str, Counter[str]] = {}
    for one in found:
        counts.setdefault(one["planted"], Counter())[one["cause"]] += 1
    return counts


def lines_of(found: list[Found]) -> list[str]:
    """Return the results as sentences."""
    planted = [one for one in found if one["planted"] != HEALTHY]
    right = sum(map(is_right, planted))
    goal = "met" if right >= MIN_RIGHT * len(planted) else "NOT MET"
    share = f"{100 * right / max(len(planted), 1):.1f} %"
    lines = [f"right: {right} of {len(planted)} planted causes, {share}; goal {100 * MIN_RIGHT:.0f} %: {goal}"]
    healthy = [one for one in found if one["planted"] == HEALTHY]
    if healthy:
        accused, unknown = sum(not is_right(one) for one in healthy), sum(one["cause"] == UNKNOWN for one in healthy)
        lines.append(f"healthy: {accused} of {len(healthy)} accused, {unknown} unknown")
    gained = [one for one in planted if is_right(one) and one["gain"] is not None]
    if gained:
        inside = sum(map(is_inside, gained))
        over = max((one["gain"] - (one["bound"] or 0.0) for one in gained), default=0.0)
        lines.append(f"gain within the bound: {inside} of {len(gained)}; largest excess {100 * over:.2f} points")
    lines += [f"wrong: {one['planted']} {one['seed']}: {one['cause']}" for one in found if not is_right(one)]
    return lines


def table(found: list[Found], path: str) -> Table:
    """Return the confusion matrix."""
    counts = matrix(found)
    names = sorted({name for row in counts.values() for name in row})
    shown = Table(title=f"Jobs in {path} time: planted cause (rows) and verdict (columns)")
    shown.add_column("planted")
    for name in names:
        shown.add_column(name.replace("_", " "), justify="right")
    for planted, row in counts.items():
        shown.add_row(planted, *(str(row[name] or "") for name in names))
    return shown


def markdown(found: list[Found]) -> str:
    """Return the confusion matrix as a table for a document: the right verdicts, the others by name, and the gains."""
    lines = ["| planted | jobs | right | other verdicts | gain within the bound |", "|---|---|---|---|---|"]
    for planted, row in matrix(found).items():
        of = [one for one in found if one["planted"] == planted]
        others = ", ".join(
            f"{name} {row[name]}"
            for name in sorted(row)
            if not is_right({"planted": planted, "cause": name}) or (planted == HEALTHY and name == UNKNOWN)
        )
        gained = [one for one in of if is_right(one) and one["gain"] is not None]
        gains = f"{sum(map(is_inside, gained))} of {len(gained)}" if gained else "–"
        lines.append(f"| `{planted}` | {len(of)} | {sum(map(is_right, of))} | {others or '–'} | {gains} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
