"""Quotients that are ``None`` if the numerator or the denominator was not measured."""

from __future__ import annotations

from effllm.records.job import ClusterTotals

GB, GIB = 1e9, 2**30
#: Largest relative random error of a shown energy; values from an energy with a larger error are not shown either.
MAX_SHOWN_ERROR = 0.2


def is_energy_known(totals: ClusterTotals) -> bool:
    """Whether the random error of the energy is small enough to show the energy."""
    return (error_share(totals.energy.error_j, totals.energy.joules) or 0.0) <= MAX_SHOWN_ERROR


def quotient(above: float, below: float) -> float | None:
    """Return a quotient, or ``None`` if the denominator is 0."""
    return above / below if below > 0 else None


def measured_quotient(above: float | None, below: float) -> float | None:
    """Return a quotient, or ``None`` if the numerator was not measured."""
    return None if above is None else quotient(above, below)


def energy_quotient(totals: ClusterTotals, joules: float | None, below: float) -> float | None:
    """Return a quotient of an energy, or ``None`` if the random error of the energy is too large."""
    return measured_quotient(joules, below) if is_energy_known(totals) else None


def error_share(error: float, value: float | None) -> float | None:
    """Return an error as a share of a value, or ``None`` without a value."""
    return error / value if value else None


def counted_quotient(count: float, below: float) -> float | None:
    """Return a quotient of a count, or ``None`` if the count is 0, because then the loop does not report this count."""
    return quotient(count, below) if count > 0 else None
