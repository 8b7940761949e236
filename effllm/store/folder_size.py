"""The size limit of a run folder, and the growth of the folder."""

from __future__ import annotations

import math
import os
from pathlib import Path

from effllm.store.reader import segments

MB = 1_000_000
#: Kinds of files with the detail of a run, from which totals were computed.
DETAIL = ("windows", "ranks")
MIN_SEGMENTS = 16  # number of files in a full folder, so that each removed file is only a small part of it
MEASURED_S = 30.0  # period over which the rate of windows is measured
#: A higher rate of windows causes a warning: a window should last at least a second.
MAX_WINDOWS_PER_S = 1.2


def segment_bytes(limit_mb: int, largest: int) -> int:
    """Return the size at which the next file of detail is started, from the folder's limit; 0 means no limit."""
    return min(largest, limit_mb * MB // MIN_SEGMENTS) if limit_mb else largest


def size_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(place, name).lstat().st_size
            except FileNotFoundError:  # the file was replaced after the folder was listed
                continue
    return total


def remove_oldest_detail(folder: Path, limit_mb: int) -> int:
    """Remove the oldest files of detail until a folder is below its limit; return the number of removed files.

    The newest file of each kind, totals, events and facts are kept.

    Raises:
        OSError: a file cannot be removed.
    """
    over_bytes = size_bytes(folder) - limit_mb * MB
    if over_bytes <= 0:
        return 0
    removed = 0
    old = [(path.lstat(), path) for stem in DETAIL for path in segments(folder, stem)[:-1]]
    for about, path in sorted(old, key=lambda one: one[0].st_mtime_ns):
        path.unlink(missing_ok=True)
        removed += 1
        over_bytes -= about.st_size
        if over_bytes <= 0:
            break
    return removed


class Growth:
    """Measures the rate of windows over periods of half a minute, until the rate is too high for the first time.

    Args:
        log_interval: iterations per window.
    """

    def __init__(self, log_interval: int) -> None:
        self._log_interval = log_interval
        self._since_s: float | None = None
        self._windows = self._reports = self._bytes = 0
        self._is_done = False

    def add(self, end_time_s: float, reports: int, num_bytes: int) -> str:
        """Add a window; return a warning when the rate is above `MAX_WINDOWS_PER_S` for the first time.

        Args:
            end_time_s: unix time of the window's end.
            reports: number of ranks that reported the window.
            num_bytes: size of the window's lines.
        """
        if self._is_done:
            return ""
        if self._since_s is None:
            self._since_s = end_time_s
            return ""
        self._windows, self._reports, self._bytes = self._windows + 1, self._reports + reports, self._bytes + num_bytes
        span_s = end_time_s - self._since_s
        if span_s < MEASURED_S:
            return ""
        rate, reports_per_s, mb_per_h = (
            value / span_s for value in (self._windows, self._reports, self._bytes * 3600 / MB)
        )
        self._since_s, self._windows, self._reports, self._bytes = end_time_s, 0, 0, 0
        if rate <= MAX_WINDOWS_PER_S:
            return ""
        self._is_done = True
        return (
            f"windows of {self._log_interval} iterations end {rate:.1f} times a second: {reports_per_s:.0f} reports/s, "
            f"and the run folder grows by {mb_per_h:,.0f} MB/h; "
            f"with EFFICIENTLLM_LOG_INTERVAL={_rounded_up(self._log_interval * rate)} a window takes a second"
        )


def _rounded_up(value: float) -> int:
    """Round up to one significant digit."""
    whole = math.ceil(value)
    unit: int = 10 ** (len(str(whole)) - 1)
    return -(-whole // unit) * unit
