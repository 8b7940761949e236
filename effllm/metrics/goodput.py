"""Metrics of the job's elapsed time by class (docs/goodput.md), and of the time lost to stragglers."""

from __future__ import annotations

from effllm.metrics.table import measured_quotient, metric, quotient
from effllm.records.job import ClusterTotals


@metric("ratio", group="goodput", bases=("job",))
def ratio(totals: ClusterTotals) -> float | None:
    """Goodput: share of the elapsed time of all attempts that was spent in kept iterations and in generation."""
    productive_s = sum(totals.goodput.class_s.get(name, 0.0) for name in ("kept", "generation"))
    return quotient(productive_s, totals.goodput.elapsed_s)


@metric("ratio", group="goodput", bases=("job",), chart=False)
def redone_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time that was spent in iterations that a restart repeated."""
    return _share_of_elapsed(totals, "redone")


@metric("ratio", group="goodput", bases=("job",), chart=False)
def restart_gap_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time between the end of an attempt and the beginning of the next."""
    return _share_of_elapsed(totals, "restart_gap")


@metric("ratio", group="goodput", bases=("job",), chart=False)
def startup_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time before the first iteration of each attempt."""
    return _share_of_elapsed(totals, "startup")


@metric("ratio", group="goodput", bases=("job",), chart=False)
def checkpoint_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time in checkpoints."""
    return _share_of_elapsed(totals, "checkpoint")


@metric("ratio", group="goodput", bases=("job",), chart=False)
def unknown_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time that no report covers."""
    return _share_of_elapsed(totals, "unknown")


@metric("J", group="goodput", bases=("job",), chart=False)
def lost_joules(totals: ClusterTotals) -> float | None:
    """Measured energy of lost time: repeated iterations, waits for stragglers, hangs."""
    lost = [totals.goodput.class_j.get(name) for name in ("redone", "straggling", "uneven_ranks", "hang")]
    return None if None in lost else sum(joules for joules in lost if joules is not None)


@metric("ranks", group="straggler", bases=("window",), chart=False)
def named_ranks(totals: ClusterTotals) -> float | None:
    """Number of reported stragglers at the end of the window; no value if no rank has a sync point."""
    return None if totals.health.straggling_s is None else float(totals.health.stragglers)


@metric("ratio", group="straggler", bases=("window",), chart=False)
def waiting_ratio(totals: ClusterTotals) -> float | None:
    """Share of iteration time in which the job waited for reported stragglers."""
    return measured_quotient(totals.health.straggling_s, totals.loop.time_s)


@metric("GPU-s", group="straggler", bases=("job",), chart=False)
def waiting_gpu_seconds(totals: ClusterTotals) -> float | None:
    """Sum over ranks of the time in which a rank waited for reported stragglers."""
    return None if totals.health.straggling_s is None else totals.health.straggling_gpu_s


@metric("J", group="straggler", bases=("job",), chart=False)
def waiting_joules(totals: ClusterTotals) -> float | None:
    """Energy of devices while their ranks waited for reported stragglers, from the mean power in each window."""
    return None if totals.health.straggling_s is None else totals.health.straggling_j


def _share_of_elapsed(totals: ClusterTotals, name: str) -> float | None:
    return quotient(totals.goodput.class_s[name], totals.goodput.elapsed_s) if name in totals.goodput.class_s else None
