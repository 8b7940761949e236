"""Compares a framework's own figure with the counts of all ranks. No I/O.

A framework's clock starts and ends at another point of the loop than the clock of an iteration.  It may include
evaluations and checkpoints, or leave out the data wait.  So a figure agrees if it is equal to the rate over iteration
time, wall time or the time of the steps; there is no statement about a figure between these rates.  A difference has a
named cause only if the factor is equal to a known quantity of the job within the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from effllm.job.audit.known import KnownJob, peaks_like, reasons_for
from effllm.records.audit import AGREES, COUNTS, NAMED, TOO_FEW, UNEXPLAINED, VARIES, AuditedFigure
from effllm.records.framework_figures import FIGURES, MFU_RATIO, TFLOPS_PER_GPU, FrameworkFigure
from effllm.records.rank import ValueStatistics

#: Smallest relative difference that is a difference: the end of a framework's interval and the end of a window differ
#: by the time of a log line and of a data wait, and logged figures are rounded.
TOLERANCE = 0.02
#: A noise above this share allows no statement; below it, no two whole numbers up to 10 are confused.
MAX_NOISE = 0.05
#: Number of windows before a named cause is stated, and before an unexplained difference is stated.
MIN_WINDOWS, MIN_UNEXPLAINED = 5, 10
#: A cumulative count over a short time grows at least by this factor in the compared windows.
MIN_GROWTH = 1.5
#: A factor above this number, or below its inverse, is no figure of a framework.
MAX_FACTOR = 1e12
VARYING = "the factor varies between windows, so there is no statement"
BETWEEN = "the figure lies between the rates over wall time and over the time of the steps, so there is no statement"
MAX_STATED = 3  # number of reasons in a sentence
NORMAL_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


class FigureWindow(Struct, frozen=True, array_like=True):
    """A framework's figure, and the counts of all ranks since its previous figure."""

    framework: float
    tokens: int = 0
    positions: int = 0
    loss_tokens: int = 0
    samples: int = 0
    time_s: float = 0.0  # iteration time
    wall_s: float = 0.0
    busy_s: float = 0.0  # time of the steps, without data wait
    iteration_first: int = 0  # ordinals within the attempt
    iteration_last: int = 0
    gap: float = 0.0  # the mean of several rates may be too high by at most this share (`mean_gap`)


class _Factor(NamedTuple):
    """The framework's figure over a rate from one count and one time."""

    counted: str  # a name of COUNTED, or samples
    time: str  # a name of TIMES
    value: float


#: The times by which a framework may divide; the first is the time of effllm's own rates.
TIMES = ("time_s", "wall_s", "busy_s")
#: Count -> what a framework counts if its figure is the rate of this count.
COUNTED = {
    "tokens": "tokens without padding",
    "positions": "all positions, with padding",
    "loss_tokens": "only positions with a label",
}


def judge(name: str, windows: Sequence[FigureWindow], known: KnownJob) -> AuditedFigure | None:
    """Return the comparison of a figure over windows; ``None`` if nothing was counted or the peak is unknown."""
    figure = FIGURES[name]
    if sum(one.gap <= MAX_NOISE for one in windows) >= MIN_WINDOWS:
        windows = [one for one in windows if one.gap <= MAX_NOISE]
    counts = ("samples",) if figure.unit == "samples/s" else tuple(COUNTED)
    scale = _scale(name, figure, known)
    factors = list(_factors(windows, figure, counts, scale))
    if not factors or factors[0].counted != counts[0]:
        return None
    ratios = _ratios(windows, figure, counts[0], scale)
    if not ratios:
        return None
    noises = {one.counted: _noise(windows, figure, one.counted, scale) for one in factors}
    return _Comparison(name, windows, factors, ratios, noises, known, scale).judged()


@dataclass(frozen=True)
class _Comparison:
    """One comparison, before its outcome."""

    name: str
    windows: Sequence[FigureWindow]
    factors: Sequence[_Factor]
    ratios: Sequence[float]
    noises: Mapping[str, float]  # by count
    known: KnownJob
    scale: float

    @property
    def noise(self) -> float:
        """The noise of the factor from effllm's own count."""
        return self.noises[self.factors[0].counted]

    def _is_usable(self, count: str) -> bool:
        return self.noises.get(count, math.inf) <= MAX_NOISE

    def _stated(self, outcome: str, text: str, reasons: tuple[str, ...] = ()) -> AuditedFigure:
        figure = FIGURES[self.name]
        own, framework = _means(self.windows, self.factors[0], figure, self.scale)
        label, unit = figure.label, figure.unit
        stated = f"{label}: framework {_shown(framework, unit)}, effllm {_shown(own, unit)}, factor "
        return AuditedFigure(
            name=self.name, unit=unit, framework=framework, own=own, factor=self.factors[0].value, noise=self.noise,
            windows=len(self.windows), outcome=outcome, text=f"{stated}{_factor_text(self.factors[0].value)}: {text}",
            reasons=reasons,
        )  # fmt: skip

    def judged(self) -> AuditedFigure:
        """Return the first explanation that fits, from the simplest to none."""
        if self._is_growing():
            return self._growing()
        if self._agrees("tokens") or self._agrees("samples"):
            return self._stated(AGREES, f"no difference beyond {100 * self._tolerance(self.factors[0].counted):.0f} %")
        if not any(map(self._is_usable, self.noises)):
            return self._stated(VARIES, VARYING)
        if len(self.windows) < MIN_WINDOWS:
            few = f"{len(self.windows)} compared windows are too few for a statement"
            return self._stated(TOO_FEW, few)
        if (counted := next((one for one in ("positions", "loss_tokens") if self._agrees(one)), "")) != "":
            return self._stated(COUNTS, self._counts_text(counted), (COUNTED[counted],))
        if self._is_between():
            return self._stated(VARIES, BETWEEN)
        if named := self._named():
            return self._stated(NAMED, named[0], named[1])
        if self.noise > MAX_NOISE or self._is_drifting():
            return self._stated(VARIES, VARYING)
        if len(self.windows) < MIN_UNEXPLAINED:
            few = f"{len(self.windows)} compared windows are too few for a statement"
            return self._stated(TOO_FEW, few)
        return self._stated(UNEXPLAINED, self._unexplained())

    def _agrees(self, count: str) -> bool:
        """Whether the figure is equal to the rate of a count over one of `TIMES`."""
        tolerance = self._tolerance(count)
        return tolerance <= MAX_NOISE and any(
            abs(one.value - 1) <= tolerance for one in self.factors if one.counted == count
        )

    def _tolerance(self, count: str) -> float:
        """Return the noise; without the gap of means if this gap is too large: they may be equal all the same."""
        noise = self.noises.get(count, math.inf)
        return noise if noise <= MAX_NOISE else noise - _mean_of_gaps(self.windows)

    def _is_between(self) -> bool:
        """Whether the figure lies between the rates over the longest and the shortest of `TIMES`."""
        found = [one.value for one in self.factors if one.counted == self.factors[0].counted]
        return min(found) < 1 < max(found)

    def _counts_text(self, counted: str) -> str:
        tokens, other = (sum(getattr(one, name) for one in self.windows) for name in ("tokens", counted))
        return f"the framework counts {COUNTED[counted]}: {other:,}, and {tokens:,} tokens without padding"

    def _named(self) -> tuple[str, tuple[str, ...]] | None:
        """Return the sentence and the reasons of a factor that is a known quantity of the job."""
        found = []
        if self.name == MFU_RATIO and self.known.peak_flops_per_s and self.noise <= MAX_NOISE:
            own = self.known.peak_flops_per_s / self.known.devices
            wrong = own / self.factors[0].value
            if names := peaks_like(wrong, self.known):
                shown = f"a peak of {wrong / 1e12:,.4g} TFLOP/s instead of {own / 1e12:,.4g}"
                found.append((shown, tuple(f"peak of {name}" for name in names)))
        for one in filter(lambda factor: self._is_usable(factor.counted), self.factors):
            tolerance = self.noises[one.counted]
            number, reasons = reasons_for(one.value, tolerance, self.known.quantities)
            if number and reasons:
                what = "" if one.counted in ("tokens", "samples") else f" of a rate of {COUNTED[one.counted]}"
                shown = f"{number}" if one.value > 1 else f"1/{number}"
                is_exact = tolerance * number < 0.5  # no other whole number is as near
                shown = f"exactly {shown}" if is_exact else f"{shown} within {100 * tolerance:.0f} %"
                found.append((f"{shown}{what}", reasons))
                break
        if not found:
            return None
        reasons = tuple(reason for _, names in found for reason in names)
        return " or ".join(f"{text} = {' or '.join(names[:MAX_STATED])}" for text, names in found), reasons

    def _is_growing(self) -> bool:
        """Whether the factor is proportional to the iterations so far: a cumulative count over a short time.

        Such a factor is never below 1; the factor of a mean since a slow start also grows, but is below 1.
        """
        if len(self.ratios) < MIN_WINDOWS or len(self.ratios) != len(self.windows) or min(self.ratios) < 1 - TOLERANCE:
            return False
        each = self._per_iteration()
        is_rising = self.ratios[-1] > MIN_GROWTH * self.ratios[0]
        return is_rising and NORMAL_MAD * _deviation(each) / len(each) ** 0.5 < TOLERANCE

    def _per_iteration(self) -> list[float]:
        middles = [(one.iteration_first + one.iteration_last) / 2 for one in self.windows]
        return [ratio / middle for ratio, middle in zip(self.ratios, middles, strict=True)]

    def _is_drifting(self) -> bool:
        """Whether the factor of the second half of the windows differs from that of the first half."""
        half = len(self.ratios) // 2
        if not half:
            return False
        first, second = statistics.median(self.ratios[:half]), statistics.median(self.ratios[half:])
        return abs(second / first - 1) > TOLERANCE

    def _growing(self) -> AuditedFigure:
        steps = max(round(1 / statistics.median(self._per_iteration())), 1)
        over = "one iteration" if steps == 1 else f"{steps:,} iterations"
        first, last = self.ratios[0], self.ratios[-1]
        text = (
            f"the framework divides all tokens since the start by the time of {over}: the factor grows with the "
            f"iterations, from {first:.3g} to {last:.3g}"
        )
        return self._stated(NAMED, text, ("cumulative count over a short time",))

    def _unexplained(self) -> str:
        factor = self.factors[0].value
        number, _ = reasons_for(factor, self.noise, {})
        if number:
            return f"differs by a factor of {number}, which is no known quantity of the job: unexplained"
        return f"differs by {100 * abs(factor - 1):.1f} % (noise ±{100 * self.noise:.1f} %), unexplained"


def _scale(name: str, figure: FrameworkFigure, known: KnownJob) -> float:
    """Return the figure of one token (or sample) per second of the whole job; 0 if a constant is unknown."""
    if name == MFU_RATIO:
        return (known.flops_per_token or 0.0) / known.peak_flops_per_s if known.peak_flops_per_s else 0.0
    each = 1.0 / known.devices if figure.per_device else 1.0
    return each * (known.flops_per_token or 0.0) / 1e12 if name == TFLOPS_PER_GPU else each


def _factors(
    windows: Sequence[FigureWindow], figure: FrameworkFigure, counts: Sequence[str], scale: float
) -> Iterator[_Factor]:
    """Yield the factors by count and time; a count that is equal to an earlier count yields nothing."""
    seen: list[int] = []
    for count in counts:
        total = sum(getattr(one, count) for one in windows)
        if total * scale <= 0 or any(abs(total / other - 1) < TOLERANCE / 4 for other in seen):
            continue
        seen.append(total)
        for time in TIMES[:1] if figure.per_iteration else TIMES:
            implied = sum(one.framework * _time_s(one, figure, time) for one in windows)
            factor = implied / (total * scale)
            if 1 / MAX_FACTOR < factor < MAX_FACTOR:
                yield _Factor(count, time, factor)


def _noise(windows: Sequence[FigureWindow], figure: FrameworkFigure, count: str, scale: float) -> float:
    """Return the noise of the factor from a count, with the time that fits the framework's clock best."""
    ratios = (_ratios(windows, figure, count, scale, time) for time in TIMES)
    spread = min(NORMAL_MAD * _deviation(one) / max(len(one), 1) ** 0.5 for one in ratios)
    noise: float = max(TOLERANCE, 3 * spread) + _mean_of_gaps(windows)
    return noise


def _mean_of_gaps(windows: Sequence[FigureWindow]) -> float:
    return sum(one.gap for one in windows) / len(windows)


def _ratios(
    windows: Sequence[FigureWindow], figure: FrameworkFigure, count: str, scale: float, time: str = TIMES[0]
) -> list[float]:
    """Return the factor of each window with a figure above 0, a count and a time."""
    totals = ((one, getattr(one, count) * scale) for one in windows if one.framework > 0)
    return [one.framework * _time_s(one, figure, time) / total for one, total in totals if total > 0 and one.time_s > 0]


def _time_s(window: FigureWindow, figure: FrameworkFigure, time: str = TIMES[0]) -> float:
    """Return a time of a window, or its number of iterations if the figure is of one iteration."""
    if figure.per_iteration:
        return float(window.iteration_last - window.iteration_first + 1)
    found: float = getattr(window, time)
    return found


def _means(
    windows: Sequence[FigureWindow], factor: _Factor, figure: FrameworkFigure, scale: float
) -> tuple[float, float]:
    """Return the own figure and the framework's figure over all windows."""
    time_s = sum(_time_s(one, figure) for one in windows)
    own = sum(getattr(one, factor.counted) for one in windows) * scale / time_s
    return own, own * factor.value


def _deviation(values: Sequence[float]) -> float:
    """Return the median absolute deviation from the median, as a share of the median."""
    middle = statistics.median(values) if values else 0.0
    return statistics.median(abs(one - middle) for one in values) / middle if middle else 0.0


def mean_gap(values: ValueStatistics) -> float:
    """Return the largest share by which the mean of rates exceeds their count over their time.

    If each rate is of the same count, this is their harmonic mean.  With the mean, the variance and the smallest value
    known, the harmonic mean is lowest for two values, of which one is the smallest.
    """
    mean = values.total / values.count
    above, variance = mean - values.least, values.squares / values.count
    if values.least <= 0 or above <= 0 or not variance > 0:
        return 0.0
    return variance / (values.least + variance / above) / mean


def _shown(value: float, unit: str) -> str:
    return f"{100 * value:.3g} %" if unit == "ratio" else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _factor_text(factor: float) -> str:
    return f"{factor:.3g}" if factor >= 1000 or factor < 0.01 else f"{factor:.3f}".rstrip("0").rstrip(".")
