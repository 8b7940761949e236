"""An amount of energy with its errors: the one form that it has from the sensor to the totals of the job."""

from __future__ import annotations

from math import sqrt
from typing import Annotated, Any

from msgspec import Meta, Struct

MAX_AMOUNT = 1e30
#: A sum that no frame may bring below zero, to nan or to infinity: see the bounds in effllm.records.rank.
Amount = Annotated[float, Meta(ge=0.0, le=MAX_AMOUNT)]

#: Half-width of a 95 % interval over the standard deviation of a normal distribution.
NORMAL_95 = 1.96
#: Less time than this is the rounding of a difference, and its quotient would be noise.
MIN_COVERED_S = 1e-6


class EnergyAmount(Struct, frozen=True, array_like=True, gc=False):
    """The energy of a stretch of time, and what may be wrong with it.

    Random errors are variances, with those of the two ends apart: what one of two neighbours gains at the edge that
    they share, the other loses.  The gain of a sensor is common to all its readings and may be common to all boards
    of a model, so it adds up linearly and never averages out (arXiv 2312.02741, section 5).
    """

    joules: Amount | None = None  # None: nothing of it was measured
    covered_s: Amount = 0.0
    start_j2: Amount = 0.0  # variance of the reading at its start ...
    end_j2: Amount = 0.0  # ... and at its end
    inside_j2: Amount = 0.0  # of what lies between: aliasing, gaps, integration of power, edges that nothing shares
    gain_j: Amount = 0.0  # half-width, 95 %, of the error by the sensor's gain
    estimated_j: Amount = 0.0  # of joules: filled from power where the counter gave nothing

    @property
    def error_j(self) -> float:
        """Half-width, 95 %, of the random error of this amount alone."""
        return NORMAL_95 * sqrt(self.start_j2 + self.end_j2 + self.inside_j2)

    def __add__(self, later: EnergyAmount) -> EnergyAmount:
        """Return the energy of this stretch and of a later one that does not begin where this one ends."""
        return self._and(later, is_shared=False)

    def then(self, later: EnergyAmount) -> EnergyAmount:
        """Return the energy of this stretch and of the one that begins where this one ends."""
        return self._and(later, is_shared=self.joules is not None and later.joules is not None)

    def __sub__(self, part: EnergyAmount) -> EnergyAmount:
        """Return what is left without a part that lies inside: where the part begins and ends, what is left does."""
        if self.joules is None or part.joules is None:
            return self
        covered_s = self.covered_s - part.covered_s
        if covered_s <= MIN_COVERED_S:
            return NOT_MEASURED
        return EnergyAmount(  # sums of floats differ by a rounding: none of them goes below zero
            joules=max(self.joules - part.joules, 0.0),
            covered_s=covered_s,
            start_j2=self.start_j2,
            end_j2=self.end_j2,
            inside_j2=max(self.inside_j2 + edge_j2(part.start_j2, part.end_j2, False) - part.inside_j2, 0.0),
            gain_j=max(self.gain_j - part.gain_j, 0.0),
            estimated_j=max(self.estimated_j - part.estimated_j, 0.0),
        )

    def _and(self, later: EnergyAmount, is_shared: bool) -> EnergyAmount:
        is_measured = self.joules is not None or later.joules is not None
        return EnergyAmount(
            joules=(self.joules or 0.0) + (later.joules or 0.0) if is_measured else None,
            covered_s=self.covered_s + later.covered_s,
            start_j2=self.start_j2,
            end_j2=later.end_j2,
            inside_j2=self.inside_j2 + later.inside_j2 + edge_j2(self.end_j2, later.start_j2, is_shared),
            gain_j=self.gain_j + later.gain_j,
            estimated_j=self.estimated_j + later.estimated_j,
        )


NOT_MEASURED = EnergyAmount()


def edge_j2(before_j2: Any, after_j2: Any, is_shared: Any) -> Any:
    """Return what an edge adds to the variance of a sum: nothing where it is shared, for errors there cancel.

    Args:
        before_j2: variance at the end of the amount before the edge, 0 where there is none; or an array of them.
        after_j2: variance at the start of the amount after it.
        is_shared: whether the two meet there.
    """
    return (before_j2 + after_j2) * (1 - is_shared)
