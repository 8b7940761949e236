"""An amount of energy with its errors, in the same form from the sensor to the job's totals."""

from __future__ import annotations

from math import sqrt
from typing import Annotated, Any

from msgspec import Meta, Struct

MAX_AMOUNT = 1e30
#: A sum that is never negative, nan or infinite, because its bounds are checked: see effllm.records.rank.
Amount = Annotated[float, Meta(ge=0.0, le=MAX_AMOUNT)]

#: Half-width of a 95 % interval of a normal distribution, in standard deviations.
NORMAL_95 = 1.96
#: A shorter duration is only the rounding error of a difference; a division by such a duration gives noise.
MIN_COVERED_S = 1e-6


class EnergyAmount(Struct, frozen=True, array_like=True, gc=False):
    """The energy of a period, with its errors.

    Random errors are stored as variances.  The variances of the two ends are separate fields: at an edge that two
    periods share, the errors of the periods are opposite and cancel in the sum.  The gain of a sensor is common to all
    readings and may be common to all boards of a model, so its error adds up linearly and never averages out (arXiv
    2312.02741, section 5).
    """

    joules: Amount | None = None  # None: not measured
    covered_s: Amount = 0.0
    start_j2: Amount = 0.0  # variance of the reading at the start
    end_j2: Amount = 0.0  # variance of the reading at the end
    inside_j2: Amount = 0.0  # variance of the rest: aliasing, gaps, integration of power, unshared inner edges
    gain_j: Amount = 0.0  # half-width, 95 %, of the error from the sensor's gain
    estimated_j: Amount = 0.0  # part of joules that was estimated from power, because the counter had no value

    @property
    def error_j(self) -> float:
        """The random error of this amount: half-width of the 95 % interval."""
        return NORMAL_95 * sqrt(self.start_j2 + self.end_j2 + self.inside_j2)

    def __add__(self, later: EnergyAmount) -> EnergyAmount:
        """Return the energy of this period and a later period; the periods share no edge."""
        return self._combine(later, is_shared=False)

    def then(self, later: EnergyAmount) -> EnergyAmount:
        """Return the energy of this period and the next period; the periods share an edge."""
        return self._combine(later, is_shared=self.joules is not None and later.joules is not None)

    def __sub__(self, part: EnergyAmount) -> EnergyAmount:
        """Return the energy without a part inside this period; the edges of the part become edges of the rest."""
        if self.joules is None or part.joules is None:
            return self
        covered_s = self.covered_s - part.covered_s
        if covered_s <= MIN_COVERED_S:
            return NOT_MEASURED
        return EnergyAmount(  # a rounding error must not make a sum negative
            joules=max(self.joules - part.joules, 0.0),
            covered_s=covered_s,
            start_j2=self.start_j2,
            end_j2=self.end_j2,
            inside_j2=max(self.inside_j2 + edge_j2(part.start_j2, part.end_j2, False) - part.inside_j2, 0.0),
            gain_j=max(self.gain_j - part.gain_j, 0.0),
            estimated_j=max(self.estimated_j - part.estimated_j, 0.0),
        )

    def _combine(self, later: EnergyAmount, is_shared: bool) -> EnergyAmount:
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
#: The columns of amounts of energy in an array; joules are nan if not measured.
AMOUNT = EnergyAmount.__struct_fields__
JOULES, COVERED_S, START_J2, END_J2 = map(AMOUNT.index, ("joules", "covered_s", "start_j2", "end_j2"))


def edge_j2(before_j2: Any, after_j2: Any, is_shared: Any) -> Any:
    """Return the variance that an edge adds to a sum: 0 if the edge is shared, because the errors cancel.

    The variances at the end before the edge and at the start after it are numbers or arrays.
    """
    return (before_j2 + after_j2) * (1 - is_shared)
