"""A framework's own figures beside the figures from the counts of all ranks. No I/O.

A framework may count padding or only labels, and its clock may include evaluations or leave out the data wait.  So the
factor between two figures says how much they differ, and not which of them is wrong.
"""

from __future__ import annotations

from msgspec import Struct

from effllm.records.framework_figures import (
    MFU_RATIO,
    SAMPLES_PER_S,
    TFLOPS_PER_GPU,
    TOKENS_PER_ITERATION,
    TOKENS_PER_S_PER_GPU,
)
from effllm.records.job import ClusterTotals
from effllm.records.rank import ValueStatistics
from effllm.records.verdict import ComparedFigure

#: Smallest relative difference that is stated: logs do not end with windows, and logged figures are rounded.
MIN_DIFFERENCE = 0.05
MIN_WINDOWS = 5  # number of compared windows before a factor is stated
#: Rates of a window are not compared if their mean may be too high by more than this share.
MAX_EXCESS = 0.02
#: A larger figure or factor is no figure of a framework: any instrument can record a value under the name of a figure.
MAX_FIGURE = 1e15


class KnownJob(Struct, frozen=True):
    """The constants of a job that the audit uses."""

    devices: int = 1  # GPUs, or ranks without GPUs
    peak_flops_per_s: float | None = None  # of the whole job
    flops_per_token: float | None = None
    max_positions: int = 0  # largest number of positions of a rank's iteration, if the framework fixes it; else 0
    precision: str = ""


class FigureSums(Struct):
    """The sums of the windows in which a figure is compared."""

    figure: float = 0.0  # the framework's figure times `over`
    count: int = 0  # tokens without padding, or samples, of all ranks
    over: float = 0.0  # iteration time in seconds, or iterations
    windows: int = 0

    def count_window(self, name: str, window: ClusterTotals) -> None:
        """Add the counts of a window, before the figure of its time is known."""
        self.count += window.counts.samples if name == SAMPLES_PER_S else window.counts.tokens
        self.over += window.counts.iterations if name == TOKENS_PER_ITERATION else window.loop.time_s

    def add(self, name: str, values: ValueStatistics, since: FigureSums) -> None:
        """Add logged values of a figure, with the counts since the figure was logged before."""
        mean = values.total / values.count
        if 0 < mean < MAX_FIGURE and (name == TOKENS_PER_ITERATION or excess_of_mean(values) <= MAX_EXCESS):
            self.figure += mean * since.over
            self.count += since.count
            self.over += since.over
            self.windows += 1


def compared(name: str, sums: FigureSums, known: KnownJob) -> ComparedFigure | None:
    """Return both figures over the same windows; ``None`` if they do not differ, or one of them is unknown."""
    own = sums.count * _figure_of_one(name, known)
    if sums.windows < MIN_WINDOWS or own <= 0:
        return None
    factor = sums.figure / own
    if abs(factor - 1) <= MIN_DIFFERENCE or not 1 / MAX_FIGURE < factor < MAX_FIGURE:
        return None
    return ComparedFigure(name, sums.figure / sums.over, own / sums.over, factor, sums.windows)


def _figure_of_one(name: str, known: KnownJob) -> float:
    """Return the figure of one token or sample in one second or iteration; 0 if a constant is unknown."""
    flops, peak = known.flops_per_token or 0.0, known.peak_flops_per_s or 0.0
    figures = {
        TOKENS_PER_S_PER_GPU: 1 / known.devices,
        TFLOPS_PER_GPU: flops / 1e12 / known.devices,
        MFU_RATIO: flops / peak if peak else 0.0,
    }
    return figures.get(name, 1.0)


def excess_of_mean(rates: ValueStatistics) -> float:
    """Return the largest share by which the mean of rates exceeds their count over their time.

    If each rate is of the same count, this is their harmonic mean.  With the mean, the variance and the smallest value
    known, the harmonic mean is lowest for two values, of which one is the smallest.
    """
    mean = rates.total / rates.count
    above, variance = mean - rates.least, rates.squares / rates.count
    if rates.least <= 0 or above <= 0 or not variance > 0:
        return 0.0
    return variance / (rates.least + variance / above) / mean
