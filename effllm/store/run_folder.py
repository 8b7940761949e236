"""Writes the run folder: JSON Lines, one write per file and window, so that a kill tears at most one line per file.

The next writer of the folder removes a torn line, and does not write existing lines again. While the disk is full or
the folder is missing, lines wait in memory, up to a limit.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from effllm.records.columns import Array, fields_of
from effllm.records.host_lines import STACKS_FILE, RecordedStacks
from effllm.records.identity import Identity
from effllm.records.job import SCHEMA_VERSION, ClusterReport, Summary
from effllm.records.rank import Event, RankReport
from effllm.store import own_files
from effllm.store.journal import (
    MAX_WAITING_BYTES,
    MB,
    MIN_SEGMENTS,
    SEGMENT_BYTES,
    Journal,
    Written,
    remove_oldest_detail,
)
from effllm.store.reader import DECODE_ERRORS, coverage_of, rank_row, read_own_json, window_line
from effllm.views.text.closing import facts_of, how_to_open
from effllm.views.text.summary import summary_text
from effllm.views.text.window import block_lines

#: Name of the run folder in the counts of unwritten windows.
SINK_NAME = "runfolder"
#: In worlds up to this size all reports are written; in larger worlds, so many per window: the largest outliers.
MAX_ROWS = 256
#: Robust z-score (Iglewicz and Hoaglin, 1993) above which a rank's step time is an outlier.
OUTLIER_Z = 3.5
#: A lower coverage is a gap; smaller losses occur at the edges of every window.
GAP_BELOW = 0.999
#: Maximum number of warnings about a folder that cannot be written, and of warnings about its recovery.
MAX_TROUBLES = 10
#: Period between lines with totals to date, because these totals are half of a line.
TOTALS_EVERY_S = 60.0
#: Period of writes to console.log; short windows are written together.
LOG_EVERY_S = 1.0
#: Maximum size of console.log, and of console.log.1: 5,000 windows each.
MAX_CONSOLE_LOG_BYTES = 2 * 2**20
MAX_STACKS_BYTES = 2**20
#: File that is removed for the last summary if the disk is full, and its size.
RESERVE, RESERVE_BYTES = ".reserve", 128 * 1024


class StoreUnavailable(Exception):
    """The run folder cannot be written; the message is one sentence with the reason and the remedy."""


def open_run_folder(folder: Path, facts: Mapping[str, Any], **options: Any) -> RunFolder:
    """Open a run folder, with the arguments of `RunFolder`; `StoreUnavailable` if it cannot be written."""
    try:
        return RunFolder(folder, facts, **options)
    except OSError as error:
        raise StoreUnavailable(
            f"{folder} cannot be written: {error.strerror or error}; set EFFICIENTLLM_RUN_DIR to a writable folder"
        ) from error


class RunFolder:
    """Writes every window, the reports of its ranks, the events, the facts and the summary of a run.

    While the folder cannot be written, lines wait in memory, up to a limit, and are written later.

    Args:
        folder: the folder, which is made if missing; the files of an earlier attempt are continued.
        facts: facts for run.json, added to the facts of an earlier attempt.
        segment_bytes: size at which the next file of windows or rank reports is started.
        max_waiting_bytes: limit of the waiting lines, for each kind.
        tensorboard_dir: folder of TensorBoard's event file, which summary.txt contains.
        limit_mb: size above which the oldest windows and rank reports are removed; 0 means no limit.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        warn: Callable[[str], None] = lambda _: None,
        tensorboard_dir: Path | None = None,
        limit_mb: int = 0,
    ) -> None:
        self._tensorboard_dir = tensorboard_dir
        self._log_text, self._next_log_monotonic_s = "", 0.0  # text for console.log, and when it is written next
        self._max_log_bytes = min(MAX_CONSOLE_LOG_BYTES, limit_mb * MB // 64 or MAX_CONSOLE_LOG_BYTES)
        self._limit_mb, self._has_warned_of_limit = limit_mb, False
        if limit_mb:
            segment_bytes = min(segment_bytes, limit_mb * MB // MIN_SEGMENTS)
        own_files.make_folder(folder)
        self._folder = folder
        place = folder.resolve()
        self._mount_point = next(path for path in (place, *place.parents) if path.is_mount())
        self._warn = warn
        self._windows, self._ranks, self._events = self._journals = (
            Journal(folder, "windows", segment_bytes, max_waiting_bytes),
            Journal(folder, "ranks", segment_bytes, max_waiting_bytes),
            Journal(folder, "events", None, max_waiting_bytes),
        )
        self._written = Written(folder)  # after the journals, which follow no link
        self._checked_files = 0  # sum of the numbers of the newest files at the last check of the folder's size
        self._last_totals_s = -math.inf  # end of the last window written with totals to date
        self._host_by_rank: dict[int, str] = {}
        self._facts: dict[str, Any] = {}
        self._written_facts: dict[str, Any] | None = None  # content of run.json; None: to be written
        self._num_waited = 0  # number of windows that waited while the folder could not be written
        self._is_in_trouble = False  # whether the folder could not be written last time
        self._num_troubles = 0  # number of times that the folder became unwritable
        self.update_facts({**_facts_of_earlier_attempt(folder / "run.json"), **facts})
        with contextlib.suppress(OSError):  # not zeros, which some file systems do not store
            own_files.replace_file(folder / RESERVE, os.urandom(RESERVE_BYTES), durable=False)

    def write(self, report: ClusterReport, reports: KeptReports | Sequence[RankReport]) -> None:
        """Append one window and the reports of its ranks; in worlds above 256 ranks only the reports of outliers."""
        if not isinstance(reports, KeptReports):
            reports = KeptReports.chosen_from(reports, report.coverage.ranks_expected)
        if report.correction or not self._written.has_window(report, reports.start_time_s):
            has_totals = report.final or report.correction or abs(report.time_s - self._last_totals_s) >= TOTALS_EVERY_S
            if has_totals:
                self._last_totals_s = report.time_s
            self._windows.queue([window_line(report, has_totals=has_totals)], report.job.constants)
            self._queue_log(report)
        self._ranks.queue(
            [
                rank_row(row, attempt=report.attempt, host=self._host_by_rank.get(row.rank), simulated=report.simulated)
                for row in reports.rows
                if not self._written.has_row(report.attempt, row)
            ]
        )
        self._flush()
        self._keep_limit()

    def write_events(self, events: Sequence[Event]) -> None:
        """Append events, oldest first, in one write, because ten thousand ranks may leave together."""
        self._events.queue(events)
        self._flush()

    def write_summary(self, summary: Summary) -> None:
        """Replace summary.json and summary.txt."""
        self._write_log()
        self._flush()
        finite = {tag: value for tag, value in summary.metrics.items() if math.isfinite(value.value)}
        left_out = dict(summary.left_out)
        if self._windows.num_dropped:
            left_out[SINK_NAME] = left_out.get(SINK_NAME, 0) + self._windows.num_dropped
        summary = msgspec.structs.replace(summary, metrics=finite, left_out=left_out)
        is_written = self._try(lambda: own_files.replace_file(self._folder / "summary.json", _indented_json(summary)))
        facts = *facts_of(summary), *(("Open", line) for line in how_to_open(self._folder, self._tensorboard_dir))
        text = summary_text(summary, facts).encode(errors="replace")
        if not is_written and summary.is_over:
            self._remove_reserve()
            self._try(lambda: own_files.replace_file(self._folder / "summary.json", _indented_json(summary)))
        self._try(lambda: own_files.replace_file(self._folder / "summary.txt", text, durable=False))

    def update_facts(self, facts: Mapping[str, Any]) -> None:
        """Add facts to run.json; new values replace old values."""
        self._facts = {**self._facts, **facts, "schema_version": SCHEMA_VERSION}
        self._host_by_rank = _host_by_rank(self._facts)
        self._flush()

    def save_state(self, state: bytes) -> bool:
        """Replace state.json; return whether the state and all earlier lines are written."""
        return not any(self._journals) and self._try(
            lambda: own_files.replace_file(self._folder / "state.json", state, durable=False)
        )

    def write_file(self, name: str, text: str) -> None:
        """Write or replace a file; its name may contain a folder below the run folder."""
        path = self._folder / name

        def write() -> None:
            own_files.make_folder(path.parent)
            own_files.replace_file(path, text.encode(), durable=False)

        self._try(write)

    def write_recorded_stacks(self, recorded: Iterable[RecordedStacks]) -> None:
        """Append recordings of stacks to stacks.jsonl; with stacks.jsonl.1, it has at most 1 MB, of the newest ones."""
        text = "".join(f"{msgspec.json.encode(stacks).decode()}\n" for stacks in recorded)
        with contextlib.suppress(OSError):  # a full disk is reported when a window is written
            self._require_disk()
            own_files.append_text(self._folder / STACKS_FILE, text, MAX_STACKS_BYTES // 2)

    def close(self) -> None:
        self._write_log()
        self._remove_reserve()
        for journal in self._journals:
            journal.close()

    def _remove_reserve(self) -> None:
        with contextlib.suppress(OSError):
            own_files.remove_file(self._folder / RESERVE)

    def _queue_log(self, report: ClusterReport) -> None:
        """Append the window's block to console.log; windows-*.jsonl has the same numbers."""
        if report.correction or report.iteration_last < report.iteration_first:
            return
        self._log_text += "".join(f"{line}\n" for line in block_lines(report))
        if time.monotonic() >= self._next_log_monotonic_s or report.final:
            self._write_log()

    def _write_log(self) -> None:
        self._next_log_monotonic_s = time.monotonic() + LOG_EVERY_S
        if self._log_text:
            with contextlib.suppress(OSError):  # a full disk is reported when the window is written
                own_files.append_text(self._folder / "console.log", self._log_text, self._max_log_bytes)
        self._log_text = ""

    def _flush(self) -> None:
        """Write waiting lines; a file that cannot be written does not block other files."""
        # Empty journals are skipped, because the check of the disk in `_try` takes as much time as a line.
        waiting = [journal.flush for journal in self._journals if journal]
        are_written = [self._try(work) for work in (self._write_facts, *waiting)]
        if all(are_written):
            self._report_recovery()

    def _keep_limit(self) -> None:
        """Remove the oldest detail if the folder is above its limit; the size is checked whenever a file is full."""
        newest_files = self._windows.number + self._ranks.number
        if not self._limit_mb or newest_files == self._checked_files:
            return
        self._checked_files = newest_files
        try:
            num_removed = remove_oldest_detail(self._folder, self._limit_mb)
        except OSError as error:
            why = error.strerror or error
            self._warn(f"the oldest windows and reports in run folder {self._folder} cannot be removed: {why}")
            return
        if num_removed and not self._has_warned_of_limit:
            self._has_warned_of_limit = True
            self._warn(
                f"run folder {self._folder} has reached {self._limit_mb:,} MB (EFFICIENTLLM_RUN_FOLDER_MB): the oldest "
                "windows and reports of ranks are removed from now on; totals and events are kept"
            )

    def _write_facts(self) -> None:
        path = self._folder / "run.json"
        if self._written_facts is not None and not path.exists():
            self._written_facts = None
            self._warn(f"run folder {self._folder} was removed during the job: it is made again, without earlier lines")
        if self._facts != self._written_facts:
            own_files.make_folder(self._folder)
            own_files.replace_file(path, _indented_json(self._facts))
            self._written_facts = self._facts

    def _try(self, work: Callable[[], None]) -> bool:
        """Run ``work`` and return whether it succeeded; the first failure causes a warning."""
        try:
            self._require_disk()
            try:
                work()
            except FileNotFoundError:  # the folder was removed since the last check
                self._write_facts()
                work()
        except OSError as error:
            if not self._is_in_trouble and self._num_troubles < MAX_TROUBLES:
                reason = error.strerror or error
                self._warn(
                    f"run folder {self._folder} cannot be written: {reason}; lines wait in memory, "
                    "training and other sinks continue"
                )
            self._num_troubles += not self._is_in_trouble
            self._is_in_trouble = True
            self._num_waited = max(self._num_waited, len(self._windows))
            return False
        return True

    def _require_disk(self) -> None:
        """Raise an error if the disk was unmounted: a new folder would be hidden after the next mount."""
        if not self._mount_point.is_mount():
            raise OSError(errno.ENODEV, f"nothing is mounted at {self._mount_point}")

    def _report_recovery(self) -> None:
        if not self._is_in_trouble:
            return
        num_dropped = self._windows.num_dropped
        if self._num_troubles <= MAX_TROUBLES:
            self._warn(
                f"run folder {self._folder} is written again: {self._num_waited} windows had to wait"
                + (f", {num_dropped} did not fit into memory and were dropped" if num_dropped else "")
            )
        self._is_in_trouble, self._num_waited = False, 0


class KeptReports(NamedTuple):
    """The reports of a window that a run folder keeps."""

    rows: Sequence[RankReport]
    start_time_s: float | None  # earliest start of all reports; None without reports

    @classmethod
    def chosen_from(
        cls,
        rows: Sequence[RankReport],
        num_ranks: int,
        busy_s: Array | None = None,
        coverage: Array | None = None,
    ) -> KeptReports:
        """Return the reports to keep: of all ranks, or in worlds above 256 ranks only of outliers.

        If they are already computed, ``busy_s`` is the time of each report in steps, and ``coverage`` the share of its
        time with measured energy.
        """
        start_s = min(map(attrgetter("start_time_s"), rows), default=None)
        kept = outliers(rows, busy_s, coverage) if max(len(rows), num_ranks) > MAX_ROWS else rows
        return cls(kept, start_s)


def outliers(
    rows: Sequence[RankReport], busy_s: Array | None = None, coverage: Array | None = None
) -> list[RankReport]:
    """Return the reports with a step time far from the median or with gaps in their measurement, in order."""
    if not rows:
        return []
    if busy_s is None:
        busy_s = fields_of(rows, ("busy_s",))[:, 0]
    if coverage is None:
        coverage = np.array([coverage_of(row) for row in rows], np.float64)  # nan: not measured
    distances_s = np.abs(busy_s - np.median(busy_s))
    scale_s = max(1.4826 * float(np.median(distances_s)), 0.01 * float(np.median(busy_s)))  # 1.4826 MAD = sigma
    z_scores = distances_s / scale_s if scale_s > 0 else np.where(distances_s > 0, math.inf, 0.0)
    if not np.isnan(coverage).all():
        has_gap = ~(coverage >= GAP_BELOW)
        z_scores[has_gap] = np.maximum(z_scores[has_gap], OUTLIER_Z * 1.01)  # chosen like an outlier
    farthest = np.argsort(-z_scores, kind="stable")[:MAX_ROWS]
    return [rows[index] for index in sorted(farthest.tolist()) if z_scores[index] > OUTLIER_Z]


_encoder = msgspec.json.Encoder(enc_hook=str)  # facts may contain types that JSON lacks, such as paths


def _indented_json(value: Any) -> bytes:
    return msgspec.json.format(_encoder.encode(value), indent=2) + b"\n"


def _host_by_rank(facts: Mapping[str, Any]) -> dict[int, str]:
    ranks = facts.get("ranks")
    hosts = {}
    for rank, about in ranks.items() if isinstance(ranks, dict) else ():
        host = about.get("host") if isinstance(about, dict) else None
        if isinstance(host, str) and str(rank).isdecimal():
            hosts[int(rank)] = host
    return hosts


def _facts_of_earlier_attempt(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(own_files.read_file(path), type=dict[str, Any])
    except (FileNotFoundError, *DECODE_ERRORS):
        return {}


def identity_of(folder: Path) -> Identity:
    """Return the identity in the run.json of an earlier attempt; empty if no such file can be read."""
    return read_own_json(folder / "run.json", Identity) or Identity()
