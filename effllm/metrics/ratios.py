"""Quotients that have no value where a part of them was not measured."""

from __future__ import annotations

from effllm.records.job import ClusterTotals

GIB = 2**30
#: An energy, or what is derived from it, is not shown where its random error is a larger share of it.
MAX_SHOWN_ERROR = 0.2


def is_energy_known(totals: ClusterTotals) -> bool:
    """Return whether energy is known well enough to be shown, by its random error."""
    return (error_share(totals.energy.error_j, totals.energy.joules) or 0.0) <= MAX_SHOWN_ERROR


def quotient(above: float, below: float) -> float | None:
    """Return a quotient; ``None`` where nothing is below the line."""
    return above / below if below > 0 else None


def measured_quotient(above: float | None, below: float) -> float | None:
    """Return a quotient; ``None`` where what is above the line was not measured."""
    return None if above is None else quotient(above, below)


def energy_quotient(totals: ClusterTotals, joules: float | None, below: float) -> float | None:
    """Return a quotient of an energy; ``None`` where the random error of the energy is too large."""
    return measured_quotient(joules, below) if is_energy_known(totals) else None


def error_share(error: float, value: float | None) -> float | None:
    """Return an error as a share of a value; ``None`` where there is no value."""
    return error / value if value else None


def counted_quotient(count: float, below: float) -> float | None:
    """Return a quotient of a count; ``None`` where the loop counted none."""
    # A loop that never counted tokens has processed an unknown number of them, not zero.
    return quotient(count, below) if count > 0 else None
