"""The run folder: plain JSON Lines, one write per file and window, so that a kill tears one line at most."""

from __future__ import annotations

import errno
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from effllm.runfolder import RankRow, rank_row, segments
from effllm.schema import ClusterReport, Event, RankReport, Summary
from effllm.sinks import Run, SinkUnavailable

SEGMENT_BYTES = 64 * 2**20
#: Worlds up to this size are kept whole; of larger ones at most so many rows a window, the strangest.
MOST_ROWS = 256
#: Robust z-score (Iglewicz and Hoaglin, 1993) from which on a rank's step time is an outlier.
OUTLIER_Z = 3.5
#: Coverage below this is a gap; above it lies what the edges of a window cost.
GAP_BELOW = 0.999


def open_sink(run: Run) -> RunFolder:
    """Open the run folder, or go on in the one that an earlier attempt left.

    Raises:
        SinkUnavailable: there is no folder, or it cannot be written.
    """
    if run.folder is None:
        raise SinkUnavailable("there is no run folder; set EFFICIENTLLM_RUN_DIR to a folder that can be written")
    try:
        return RunFolder(run.folder, run.facts)
    except OSError as error:
        raise SinkUnavailable(
            f"run folder {run.folder} cannot be written: {error.strerror or error}; "
            "set EFFICIENTLLM_RUN_DIR to a folder that can"
        ) from error


class RunFolder:
    """Keeps every window, the rows of its ranks, the events, the facts and the summary of a run."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], *, segment_bytes: int = SEGMENT_BYTES) -> None:
        _make_folder(folder)
        self._folder = folder
        self._windows = _Segments(folder, "windows", segment_bytes)
        self._ranks = _Segments(folder, "ranks", segment_bytes)
        self._events = _Lines(folder / "events.jsonl")
        self._facts: dict[str, Any] | None = None
        self._hosts: dict[int, str] = {}
        self.update_facts({**_facts_of_earlier_attempt(folder / "run.json"), **facts})

    def write(self, report: ClusterReport, rows: Sequence[RankReport]) -> None:
        """Append one window and the rows of its ranks; of worlds above 256 only the rows that stand out."""
        # JSON has no nan: one in here would make the line unreadable as a whole.
        finite = {tag: value for tag, value in report.values.items() if math.isfinite(value)}
        self._windows.append([msgspec.structs.replace(report, values=finite)])
        flat = [self._flat(row, report) for row in rows]
        if max(len(rows), report.coverage.ranks_expected) > MOST_ROWS:
            flat = outliers(flat)
        self._ranks.append(flat)

    def event(self, event: Event) -> None:
        """Append an event."""
        self._events.append([event])

    def summarize(self, summary: Summary) -> None:
        """Replace summary.json."""
        finite = {tag: value for tag, value in summary.metrics.items() if math.isfinite(value.value)}
        _replace(self._folder / "summary.json", _pretty(msgspec.structs.replace(summary, metrics=finite)))

    def update_facts(self, facts: Mapping[str, Any]) -> None:
        """Add facts to run.json, the new over the old."""
        merged = {**(self._facts or {}), **facts}
        if merged != self._facts:
            _replace(self._folder / "run.json", _pretty(merged))
            self._facts = merged
            self._hosts = _hosts(merged)

    def keep(self, state: bytes) -> None:
        """Replace state.json, from which a killed aggregator is replaced."""
        _replace(self._folder / "state.json", state, durable=False)

    def close(self) -> None:
        """Close the files."""
        for lines in (self._windows, self._ranks, self._events):
            lines.close()

    def _flat(self, row: RankReport, report: ClusterReport) -> RankRow:
        return rank_row(row, attempt=report.attempt, host=self._hosts.get(row.rank), simulated=report.simulated)


def outliers(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return the rows whose step time lies far from the median or whose measurement has gaps, in their order."""
    if not rows:
        return []
    median = statistics.median(row.busy_s for row in rows)
    deviation = 1.4826 * statistics.median(abs(row.busy_s - median) for row in rows)
    scale = max(deviation, 0.01 * median)
    measured = any(row.coverage is not None for row in rows)

    def strangeness(row: RankRow) -> float:
        distance = abs(row.busy_s - median)
        far = distance / scale if scale > 0 else math.inf if distance else 0.0
        gap = measured and (row.coverage is None or row.coverage < GAP_BELOW)
        return max(far, OUTLIER_Z * 1.01) if gap else far

    strange = sorted((row for row in rows if strangeness(row) > OUTLIER_Z), key=strangeness, reverse=True)
    kept = {id(row) for row in strange[:MOST_ROWS]}
    return [row for row in rows if id(row) in kept]


class _Lines:
    """A JSON Lines file that is only ever appended to, by whole lines."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def append(self, rows: Iterable[Any]) -> None:
        text = b"".join(_encoder.encode(row) + b"\n" for row in rows)
        if not text:
            return
        size = self.size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            text = b"\n" + text  # a writer before was killed in a line, or its disk was full
        while text:
            text = text[os.write(self._descriptor, text) :]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Segments:
    """Lines in numbered files, a new one where the last has grown large."""

    def __init__(self, folder: Path, stem: str, most_bytes: int) -> None:
        self._folder, self._stem, self._most_bytes = folder, stem, most_bytes
        there = segments(folder, stem)
        self._number = int(there[-1].stem.rpartition("-")[2]) if there else 1
        self._lines = self._open(self._number)

    def append(self, rows: Sequence[Any]) -> None:
        if self._lines.size >= self._most_bytes:
            full, self._lines = self._lines, self._open(self._number + 1)
            self._number += 1
            full.close()
        self._lines.append(rows)

    def close(self) -> None:
        self._lines.close()

    def _open(self, number: int) -> _Lines:
        return _Lines(self._folder / f"{self._stem}-{number:04d}.jsonl")


_encoder = msgspec.json.Encoder(enc_hook=str)  # facts may hold paths and the like


def _make_folder(folder: Path) -> None:
    for missing in reversed([folder, *folder.parents]):
        if not missing.exists():
            missing.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(_encoder.encode(value), indent=2) + b"\n"


def _replace(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Put a whole new file in the place of the old one, or leave the old one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:  # against a crash of the machine; once per window would be too often
                os.fsync(descriptor)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def _hosts(facts: Mapping[str, Any]) -> dict[int, str]:
    """Return the host of each rank, where run.json tells it."""
    ranks = facts.get("ranks")
    hosts = {}
    for rank, about in ranks.items() if isinstance(ranks, dict) else ():
        host = about.get("host") if isinstance(about, dict) else about
        if isinstance(host, str) and str(rank).isdecimal():
            hosts[int(rank)] = host
    return hosts


def _facts_of_earlier_attempt(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
