"""The curves of a run: values of metrics and distributions over its windows, read in one pass with bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from effllm.records.job import Spread, WindowReport
from effllm.records.values import MAX_VALUE
from effllm.store.reader import JsonLines, segments

#: A curve with more points in memory is thinned to half of them.
MAX_POINTS = 2**17
_NEIGHBOURS = 4  # of so many neighbours two are kept: the smallest and the largest

#: Tag of the loss; ``spread/NAME/FIELD`` is the tag of a field of a distribution.
LOSS = "loss"
#: Tags of the loss over another axis than the iterations.
OVER_TOKENS, OVER_JOULES, OVER_SECONDS = "loss/tokens", "loss/joules", "loss/seconds"


class Curve:
    """Points in the order of recording, thinned above `MAX_POINTS`; the smallest and the largest one always stay.

    A value that was not measured is nan, and one above `MAX_VALUE` counts as nan: the curve has a gap there.
    """

    def __init__(self) -> None:
        self.count = 0  # number of measured values
        self.last = math.nan
        self._x, self._y = array("d"), array("d")

    def add(self, x: float, y: float) -> None:
        """Add a point; of two nan in succession, only the first is kept."""
        if abs(y) <= MAX_VALUE:
            self.count += 1
            self.last = y
        elif not self._y or math.isnan(self._y[-1]):
            return
        else:
            y = math.nan
        self._x.append(x)
        self._y.append(y)
        if len(self._y) >= MAX_POINTS:
            self._drop_half()

    def thinned(self, buckets: int) -> tuple[list[float], list[float]]:
        """Return x and y of few points: the first, the last, and of each bucket of x the extremes of y and the gaps."""
        x, y = np.frombuffer(self._x), np.frombuffer(self._y)
        if len(x) <= 2 * buckets:
            return x.tolist(), y.tolist()
        kept_indices = {0, len(x) - 1}
        starts = _bucket_starts(x, buckets)
        for begin, end in zip(starts, [*starts[1:], len(x)], strict=True):
            values = y[begin:end]
            if np.isnan(values).all():
                kept_indices.add(begin)
                continue
            if begin and np.isnan(values[0]):  # the gap before the first value of this bucket
                kept_indices.add(begin)
            kept_indices |= {begin + int(np.nanargmin(values)), begin + int(np.nanargmax(values))}
        order = sorted(kept_indices)
        return x[order].tolist(), y[order].tolist()

    def _drop_half(self) -> None:
        num_thinned = (len(self._y) - 1) // _NEIGHBOURS * _NEIGHBOURS  # number of points; the last point of all stays
        x, y = (np.frombuffer(values)[:num_thinned].reshape(-1, _NEIGHBOURS) for values in (self._x, self._y))
        missing = np.isnan(y)
        min_index = np.where(missing, np.inf, y).argmin(axis=1)
        max_index = np.where(missing, -np.inf, y).argmax(axis=1)
        # Neighbours without a value keep one nan twice; those with one value keep this value and a neighbour.
        kept_indices = np.sort(np.stack([min_index, max_index], axis=1), axis=1)
        kept = [np.take_along_axis(values, kept_indices, axis=1).ravel() for values in (x, y)]
        ends = [values[num_thinned:] for values in (self._x, self._y)]
        self._x, self._y = (array("d", part.tobytes()) + end for part, end in zip(kept, ends, strict=True))


def _bucket_starts(x: Any, buckets: int) -> list[int]:
    """Return the first index of each bucket: equal widths of x, as a thinned curve has uneven distances.

    After a restart x goes back, so a run of many attempts has more buckets: then the buckets have equal counts.
    """
    low, high = float(x.min()), float(x.max())
    bucket_of_point = np.minimum(np.floor((x - low) / ((high - low) or 1.0) * buckets), buckets - 1)
    starts = np.flatnonzero(np.diff(bucket_of_point, prepend=-1.0))
    if len(starts) > 2 * buckets:
        starts = np.linspace(0, len(x), buckets, endpoint=False).astype(int)
    return [int(start) for start in starts]


class _Sums(Struct, frozen=True):
    tokens: float = 0.0


class CurveLine(WindowReport, frozen=True, kw_only=True):
    """A line of windows-*.jsonl, with the tokens of the window: its other totals would take as long to decode."""

    iteration: Annotated[int, Meta(ge=-(2**53), le=2**53)]  # exact as a float
    last: _Sums = _Sums()


class WindowCurves:
    """The curves of a run over its iterations, by tag, with the number of lines that cannot be read."""

    def __init__(self, tags: Iterable[str]) -> None:
        self.skipped_lines = 0
        self.is_simulated = False  # whether a window had simulated devices
        self.last_spread: dict[str, Spread] = {}  # distributions of the last window that has any
        self.curves = {tag: Curve() for tag in tags}
        self._loss_over = {tag: curve for tag, curve in self.curves.items() if tag.startswith(f"{LOSS}/")}
        self._metric_tags = [tag for tag in self.curves if not tag.startswith((LOSS, "spread/"))]
        parts = [(tag, *tag.split("/")[1:]) for tag in self.curves if tag.startswith("spread/")]
        self._spreads = [(self.curves[tag], name, field) for tag, name, field in parts]
        self._attempt = 0
        self._tokens_so_far, self._first_end_s = 0.0, math.nan  # the end of the first window, as unix time

    def read_folder(self, folder: Path) -> None:
        """Read the windows of a run."""
        lines = JsonLines([path for path in segments(folder, "windows") if path.is_file()], CurveLine)
        for line in lines:
            # A correction has the counts of late reports; a window without an iteration has no values of iterations.
            if not (line.correction or line.iteration_last < line.iteration_first):
                self._add_window(line)
        self.skipped_lines = lines.num_skipped

    def _add_window(self, line: CurveLine) -> None:
        self.is_simulated |= line.simulated
        x = float(line.iteration)
        if line.attempt != self._attempt:  # a restart repeats iterations: the curve begins again
            self._attempt = line.attempt
            for curve in self.curves.values():
                curve.add(x, math.nan)
        values = line.values
        for tag in self._metric_tags:
            self.curves[tag].add(x, values.get(tag, math.nan))
        if LOSS in self.curves:
            self.curves[LOSS].add(x, math.nan if line.loss is None else line.loss)
        if self._loss_over:
            self._add_loss_over(line)
        self.last_spread = line.spread or self.last_spread
        for curve, name, field in self._spreads:
            spread = line.spread.get(name)
            curve.add(x, math.nan if spread is None else getattr(spread, field))

    def _add_loss_over(self, line: CurveLine) -> None:
        self._tokens_so_far += line.last.tokens
        self._first_end_s = line.time_s if math.isnan(self._first_end_s) else self._first_end_s
        x_by_tag = {
            OVER_TOKENS: self._tokens_so_far or math.nan,
            OVER_JOULES: line.values.get("energy/measured_joules", math.nan),
            OVER_SECONDS: line.time_s - self._first_end_s,
        }
        for tag, curve in self._loss_over.items():
            if line.loss is not None and math.isfinite(x_by_tag[tag]):
                curve.add(x_by_tag[tag], line.loss)
