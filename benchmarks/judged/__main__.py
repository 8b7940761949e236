"""Plants jobs with a known loss, runs each through effllm, and judges the verdicts.  ``python -m benchmarks.judged``.

Without a number of jobs, every kind is planted in virtual time with the seeds of ``--seeds``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.judged.healthy import HEALTHY
from benchmarks.judged.judging import Found, goals, table, virtual, worst
from benchmarks.judged.kinds import KINDS
from benchmarks.judged.real import REAL_KINDS, run_real
from benchmarks.machine import machine

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judged", description=__doc__)
    parser.add_argument("--virtual", type=int, help="number of planted jobs in virtual time")
    parser.add_argument("--healthy", type=int, help="number of healthy jobs in virtual time")
    parser.add_argument("--real", type=int, help="number of jobs with real processes")
    parser.add_argument("--seeds", default="0-9", help="first and last seed of each kind, such as 0-9")
    parser.add_argument("--kinds", default="", help="kinds, separated by commas")
    parser.add_argument("--keep", action="store_true", help="write the results to benchmarks/results/")
    parser.add_argument("--markdown", action="store_true", help="print only the tables")
    given = parser.parse_args()
    first, last = map(int, given.seeds.split("-"))
    seeds = range(first, last + 1)
    asked = given.kinds.split(",") if given.kinds else []
    counts = {"virtual": given.virtual, "healthy": given.healthy, "real": given.real}
    if all(count is None for count in counts.values()):
        counts["virtual"] = len(KINDS) * len(seeds)
    found: list[Found] = []
    for path, count, kinds, run in (
        ("virtual", counts["virtual"], tuple(KINDS), virtual),
        ("virtual", counts["healthy"], (HEALTHY,), virtual),
        ("real", counts["real"], tuple(REAL_KINDS), run_real),
    ):
        chosen = [kind for kind in kinds if not asked or kind in asked]
        found += _run(path, run, list(_jobs(chosen, seeds, count or 0)))
    for path in ("virtual", "real"):
        if of := [one for one in found if one["path"] == path]:
            _print(path, sorted(of, key=lambda one: [*KINDS, *REAL_KINDS, HEALTHY].index(one["kind"])), given)
    if given.keep:
        print(f"kept in {_keep(found)}")
    return 0


def _jobs(kinds: Sequence[str], seeds: range, count: int) -> Iterator[tuple[str, int]]:
    """Yield at most this many jobs, one of each kind for each seed; a single kind may have more seeds."""
    number = 0
    for seed in seeds if len(kinds) > 1 else range(seeds.start, seeds.start + count):
        for kind in kinds:
            if number < count:
                yield kind, seed
            number += 1


def _run(path: str, run: Callable[[str, int], Found | None], jobs: list[tuple[str, int]]) -> list[Found]:
    found = []
    for number, (kind, seed) in enumerate(jobs, 1):
        try:
            one = run(kind, seed)
        except Exception as error:  # noqa: BLE001 - one failed job does not end the benchmark
            print(f"{path} {kind}:{seed} failed: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if one is not None:
            found.append(one)
        if number % 50 == 0 or path == "real":
            print(f"{path} {number} of {len(jobs)}: {kind}:{seed} {one['cause'] if one else ''}", file=sys.stderr)
    return found


def _print(path: str, found: list[Found], given: argparse.Namespace) -> None:
    timed = [one for one in found if one["has_times"]]
    print(f"\n## {len(found)} jobs in {path} time\n")
    print("\n".join(goals(found)))
    if len(timed) < len(found):
        print(f"\nthe {len(timed)} jobs with times of single iterations:\n" + "\n".join(goals(timed)))
    print("\n" + "\n".join(table(found)))
    if not given.markdown:
        print("\nThe five worst cases of each kind:\n" + "\n".join(worst(found)))
        spent_s = sum(one["spent_s"] for one in found)
        print(f"\n{spent_s:.0f} s, {spent_s / len(found):.2f} s for a job")


def _keep(found: list[Found]) -> Path:
    about = machine(command="python -m benchmarks.judged " + " ".join(sys.argv[1:]))
    path = RESULTS / f"{about['date']}-judged.json"
    lines = ",\n".join(json.dumps(one) for one in found)
    path.write_text(f'{{"machine": {json.dumps(about)},\n"jobs": [\n{lines}\n]}}\n')
    return path


if __name__ == "__main__":
    raise SystemExit(main())
