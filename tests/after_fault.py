"""Checks after each fault: the run folder has every iteration once; the fault did not delay the training."""

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

#: Share of a run's energy before its first sample and after its last sample.
ENERGY_ERROR = 0.02
FULL_COVERAGE = 0.99


def assert_whole(
    ledger: Ledger,
    iterations: Mapping[int, int],
    tokens: int = 100,
    status: str = "completed",
    local_ranks: Mapping[int, int] | None = None,
) -> Summary:
    """Compare the run folder with the true iterations of each rank, their tokens, and the energy of the waveform."""
    summary = ledger.summary
    assert summary.status == status
    assert (summary.iterations, summary.tokens) == (max(iterations.values()), tokens * sum(iterations.values()))
    rows = {rank: [row for row in ledger.ranks if row.rank == rank] for rank in iterations}
    for rank, count in iterations.items():
        rows[rank].sort(key=lambda row: (row.attempt, row.window))  # late reports are at the end of the file
        held = [i for row in rows[rank] for i in range(row.iteration_first, row.iteration_last + 1)]
        truth = set(range(1, count + 1))
        twice = {one for one in held if held.count(one) > 1}
        assert held == sorted(truth), f"rank {rank} has no {sorted(truth - set(held))}, twice {sorted(twice)}"
        assert sum(row.tokens for row in rows[rank]) == tokens * count
        _assert_energy(rank, rows[rank], (local_ranks or {}).get(rank, rank))
    shown = [report.iteration_last for report in ledger.windows if not report.correction]
    assert shown == sorted(shown)
    assert len({report.window for report in ledger.windows if not report.correction}) == len(shown)
    if summary.energy.total_joules is not None:
        sum_j = sum(row.energy_j for of_rank in rows.values() for row in of_rank)
        assert summary.energy.total_joules == approx(sum_j, rel=1e-6)
    return summary


def _assert_energy(rank: int, rows: Sequence[Any], local_rank: int) -> None:
    """Compare the energy in a rank's reports with the true energy.

    On a busy machine samples can be missing, mostly at the edges of short windows. During such a gap the power is
    between the minimum and the maximum of the waveform, so the tolerance of a report includes its gaps.
    """
    measured = [row for row in rows if row.energy_j is not None]
    assert measured, f"rank {rank}: no row has energy"
    wave = waveform_of(local_rank)
    min_w, max_w = (wave.power_mean_w + sign * wave.power_amplitude_w for sign in (-1, 1))
    for row in measured:
        truth_j, gap_s = true_j([row], local_rank), row.wall_s - row.energy_covered_s
        error_j = ENERGY_ERROR * truth_j + 3 * (row.energy_error_j or 0.0)
        assert truth_j - gap_s * max_w - error_j <= row.energy_j <= truth_j - gap_s * min_w + error_j, row
    whole = [row for row in measured if row.coverage > FULL_COVERAGE]
    print(f"rank {rank}: {len(measured)} of {len(rows)} rows have energy, {len(whole)} without a gap")
    if whole:
        truth_j = true_j(whole, local_rank)
        stated_j = 3 * sum(row.energy_error_j or 0.0 for row in whole)
        assert sum(row.energy_j for row in whole) == approx(truth_j, rel=ENERGY_ERROR, abs=stated_j)


def true_j(rows: Sequence[Any], local_rank: int) -> float:
    """Return the true energy of a local rank's simulated device in the windows of these reports."""
    unix_s, wave = time.time() - time.monotonic(), waveform_of(local_rank)
    return sum(wave.energy_j(row.start_time_s - unix_s, row.end_time_s - unix_s) for row in rows)


def assert_undisturbed(job: Job, between_s: tuple[float, float], max_s: float = 0.2) -> None:
    """Print the ratio of the step times during the fault to the other step times; fail if a step takes longer than
    `max_s`. The wait for a CPU core is subtracted from each step.

    The ratio has no limit, because other processes of the machine affect it.
    """
    truth = json.loads((job.folder / "truth.json").read_text())
    starved_s = [after - before for before, after in pairwise(truth["starved_s"])]
    steps = [(start, end - start - less_s) for (start, end), less_s in zip(truth["steps"], starved_s, strict=True)]
    during = [took for start, took in steps if between_s[0] <= start <= between_s[1]]
    outside = [took for start, took in steps if not between_s[0] <= start <= between_s[1]]
    assert during and outside
    ratio = statistics.median(during) / statistics.median(outside)
    print(f"median step during the fault over outside it: {ratio:.3f}; the longest took {max(during):.4f} s")
    assert max(during) < max_s


def assert_readable(folder: Path, unfinished: bool = False) -> None:
    """Check that every JSON file of a run folder is complete and that no temporary file of effllm remains.

    unfinished: whether a temporary file may remain, because a writer still runs or was killed. The next start removes
    this file.
    """
    for path in folder.glob("*.json"):
        msgspec.json.decode(path.read_bytes())
    begun = {".reserve", *(f".{name}.new" for name in ("run.json", "state.json", "summary.json"))}
    assert {path.name for path in folder.glob(".*")} <= (begun if unfinished else set())
