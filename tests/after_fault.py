"""What must hold after every fault: the ledger has all that happened, once, and training has not noticed."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from jobs import Job, Ledger
from pytest import approx

from effllm.devices.simulated import waveform_of
from effllm.records.job import Summary

#: Of the energy of a run: what the first and the last sample leave open.
ENERGY_ERROR = 0.02
WHOLE_COVERAGE = 0.99


def assert_whole(
    ledger: Ledger,
    iterations: Mapping[int, int],
    tokens: int = 100,
    status: str = "completed",
    local_ranks: Mapping[int, int] | None = None,
) -> Summary:
    """Compare what is in the folder with the truth: iterations by rank, tokens of each, joules of the waveform."""
    summary = ledger.summary
    assert summary.status == status
    assert (summary.iterations, summary.tokens) == (max(iterations.values()), tokens * sum(iterations.values()))
    rows = {rank: [row for row in ledger.ranks if row.rank == rank] for rank in iterations}
    for rank, count in iterations.items():
        rows[rank].sort(key=lambda row: (row.attempt, row.window))  # late ones stand behind
        held = [i for row in rows[rank] for i in range(row.iteration_first, row.iteration_last + 1)]
        truth = set(range(1, count + 1))
        twice = {one for one in held if held.count(one) > 1}
        assert held == sorted(truth), f"rank {rank} lacks {sorted(truth - set(held))}, twice there are {sorted(twice)}"
        assert sum(row.tokens for row in rows[rank]) == tokens * count
        _assert_energy(rank, rows[rank], (local_ranks or {}).get(rank, rank))
    shown = [report.iteration_last for report in ledger.windows if not report.correction]
    assert shown == sorted(shown)
    assert len({report.window for report in ledger.windows if not report.correction}) == len(shown)
    if summary.energy.total_joules is not None:
        told_j = sum(row.energy_j for of_rank in rows.values() for row in of_rank)
        assert summary.energy.total_joules == approx(told_j, rel=1e-6)
    return summary


def _assert_energy(rank: int, rows: Sequence[Any], local_rank: int) -> None:
    """Compare what rows say of energy with the truth, each as far as it says that it was covered.

    A machine that is busy elsewhere may leave holes, at the edges of short windows above all.  In a hole the device
    drew no less than the least of its waveform and no more than the most.
    """
    measured = [row for row in rows if row.energy_j is not None]
    assert measured, f"rank {rank}: no row has energy"
    wave = waveform_of(local_rank)
    least_w, most_w = (wave.power_mean_w + sign * wave.power_amplitude_w for sign in (-1, 1))
    for row in measured:
        truth_j, hole_s = true_j([row], local_rank), row.wall_s - row.energy_covered_s
        error_j = ENERGY_ERROR * truth_j + 3 * (row.energy_error_j or 0.0)
        assert truth_j - hole_s * most_w - error_j <= row.energy_j <= truth_j - hole_s * least_w + error_j, row
    whole = [row for row in measured if row.coverage > WHOLE_COVERAGE]
    print(f"rank {rank}: {len(measured)} of {len(rows)} rows have energy, {len(whole)} without a hole")
    if whole:
        truth_j = true_j(whole, local_rank)
        stated_j = 3 * sum(row.energy_error_j or 0.0 for row in whole)
        assert sum(row.energy_j for row in whole) == approx(truth_j, rel=ENERGY_ERROR, abs=stated_j)


def true_j(rows: Sequence[Any], local_rank: int) -> float:
    """Return what the simulated device of a local rank drew in these rows."""
    unix_s, wave = time.time() - time.monotonic(), waveform_of(local_rank)
    return sum(wave.energy_j(row.start_time_s - unix_s, row.end_time_s - unix_s) for row in rows)


def assert_undisturbed(job: Job, between_s: tuple[float, float], longest_s: float = 0.2) -> None:
    """Say what the steps took during the fault and beside it; fail only where one waited for long, and not for a core.

    A ratio is printed, because other processes of the machine are in it.
    """
    truth = json.loads((job.folder / "truth.json").read_text())
    starved_s = [after - before for before, after in pairwise(truth["starved_s"])]
    steps = [(start, end - start - less_s) for (start, end), less_s in zip(truth["steps"], starved_s, strict=True)]
    during = [took for start, took in steps if between_s[0] <= start <= between_s[1]]
    beside = [took for start, took in steps if not between_s[0] <= start <= between_s[1]]
    assert during and beside
    ratio = statistics.median(during) / statistics.median(beside)
    print(f"median step during the fault over beside it: {ratio:.3f}; the longest took {max(during):.4f} s")
    assert max(during) < longest_s


def assert_readable(folder: Path, unfinished: bool = False) -> None:
    """Read every JSON file of a run folder whole; none may be half written, and none of ours stays beside them.

    Whoever is at work, or was killed with all others, may have begun one of them; the next start takes that away.
    """
    for path in folder.glob("*.json"):
        msgspec.json.decode(path.read_bytes())
    begun = {f".{name}.new" for name in ("run.json", "state.json", "summary.json")} if unfinished else set()
    assert {path.name for path in folder.glob(".*")} <= begun
