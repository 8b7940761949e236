"""The sums of each rank over the newest windows of a run, with bounded memory and a bounded number of bytes."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from effllm.store.reader import JsonLines, segments

#: Files of rank reports are read up to this size, the newest first: 64 MiB each.
MAX_BYTES = 256 * 2**20
#: Ranks above this number are left out.
MAX_RANKS = 65_536


class RankSumLine(Struct, frozen=True):
    """The used fields of a line of ranks-*.jsonl."""

    rank: int
    iteration_first: int = 0
    iteration_last: int = 0
    iteration_shown: int = 0
    wall_s: float = 0.0
    busy_s: float = 0.0
    wait_s: float = 0.0
    host: str | None = None
    device: str | None = None
    energy_j: float | None = None
    energy_covered_s: float = 0.0
    memory_peak_bytes: float | None = None
    utilization_seconds: float | None = None
    utilization_covered_s: float = 0.0


class RankMeans(Struct):
    """Sums of one rank over its reports; a quotient of two sums is a mean over the same windows."""

    host: str | None = None
    device: str | None = None
    reports: int = 0
    iterations: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    energy_j: float = 0.0
    energy_covered_s: float = 0.0
    memory_peak_bytes: float | None = None
    utilization_seconds: float = 0.0
    utilization_covered_s: float = 0.0

    @property
    def step_s(self) -> float | None:
        """Mean step time."""
        return self.busy_s / self.iterations if self.iterations else None

    @property
    def wait_ratio(self) -> float | None:
        """Data wait divided by the time of the iterations."""
        whole_s = self.busy_s + self.wait_s
        return self.wait_s / whole_s if whole_s > 0 else None

    @property
    def power_w(self) -> float | None:
        """Mean power of the rank's first device."""
        return self.energy_j / self.energy_covered_s if self.energy_covered_s > 0 else None

    @property
    def utilization(self) -> float | None:
        """Mean utilization of the rank's first device."""
        return self.utilization_seconds / self.utilization_covered_s if self.utilization_covered_s > 0 else None

    def add(self, line: RankSumLine) -> None:
        """Add a report."""
        self.host, self.device = line.host or self.host, line.device or self.device
        self.reports += 1
        self.iterations += max(line.iteration_last - line.iteration_first + 1, 0)
        self.busy_s += line.busy_s
        self.wait_s += line.wait_s
        if line.energy_j is not None:
            self.energy_j += line.energy_j
            self.energy_covered_s += line.energy_covered_s
        if line.memory_peak_bytes is not None:
            self.memory_peak_bytes = max(self.memory_peak_bytes or 0.0, line.memory_peak_bytes)
        if line.utilization_seconds is not None:
            self.utilization_seconds += line.utilization_seconds
            self.utilization_covered_s += line.utilization_covered_s


class RankReports:
    """The sums of all ranks with reports, and the iterations that they cover."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankMeans] = {}
        self.first_iteration: int | None = None
        self.last_iteration: int | None = None
        self.skipped = 0
        self.unread_bytes = 0  # of older files

    def read(self, folder: Path) -> None:
        """Read the newest rank reports of a run.

        Raises:
            OSError: a file cannot be read.
        """
        newest: list[Path] = []
        size = 0
        for path in filter(Path.is_file, reversed(segments(folder, "ranks"))):
            size += (about := path.stat().st_size)
            if newest and size > MAX_BYTES:
                self.unread_bytes += about
            else:
                newest.insert(0, path)
        found = JsonLines(newest, RankSumLine)
        for line in found:
            if line.rank in self.ranks or len(self.ranks) < MAX_RANKS:
                self.ranks.setdefault(line.rank, RankMeans()).add(line)
                self.last_iteration = line.iteration_shown or line.iteration_last
                if self.first_iteration is None:
                    self.first_iteration = self.last_iteration
        self.skipped = found.skipped
