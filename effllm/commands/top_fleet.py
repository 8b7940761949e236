"""``effllm top`` of a folder of runs, or of a ledger: its running jobs, the worst first."""

from __future__ import annotations

import json
import locale
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from effllm.analysis.ledger import LedgerRun, ledger_runs
from effllm.analysis.run_folders import UnreadableRun, find_runs, started_s
from effllm.analysis.run_row import Unreadable, read_record
from effllm.analysis.sides import STALE_AFTER_S
from effllm.commands import top_terminal
from effllm.commands.top_folder import FolderSource
from effllm.commands.top_terminal import TICK_S, screen, wake, wake_pipe
from effllm.records.identity import Identity
from effllm.records.job import Summary
from effllm.records.plain_text import one_line
from effllm.views.text.numbers import duration, readable, scaled
from effllm.views.top.text import BAD, BOLD, DIM, GOOD, PLAIN, REVERSE, WARNING, Line, clipped, fit, plain

READ_EVERY_S, MAX_READ_S = 5.0, 0.1  # period of reading, and the longest time of a reading before a frame
NO_UPDATE_S, ENDED_AFTER_S = 150.0, 3600.0  # a summary is written every minute; a job without one for an hour has ended
DOCUMENT_VERSION = 1
_TAG_OF_FIELD = {
    "tokens_per_second_per_gpu": "run_throughput/tokens_per_second_per_gpu",
    "mfu_ratio": "run_throughput/mfu_ratio",
    "busy_ratio": "pcu_ratio",
}

#: States, the worst first.
STATES = ("stalled", "no update", "running", "starting")
_STYLES = {"stalled": BAD, "no update": WARNING, "running": GOOD}
KEYS = "enter opens the job, and q comes back  up down  q quit"
#: Columns: name, width, and width from which on the screen has them.
_COLUMNS = (("user", 9, 70), ("partition", 9, 110), ("GPUs", 6, 0), ("lost", 6, 0), ("tok/s/GPU", 9, 0),
            ("MFU", 6, 0), ("busy", 5, 100), ("time", 9, 120))  # fmt: skip
_STATE_WIDTH, _MIN_NAME_WIDTH, _MAX_NAME_WIDTH, _MIN_VERDICT_WIDTH = 9, 10, 28, 29


class JobLine(NamedTuple):
    """One running job; ``None``: not measured."""

    name: str
    folder: str
    state: str = "running"
    user: str | None = None
    partition: str | None = None
    gpus: int | None = None
    elapsed_s: float | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu_ratio: float | None = None
    busy_ratio: float | None = None
    verdict: str = ""  # in one line
    lost_gpus: float = 0.0  # GPUs whose whole time would be lost
    updated_time_s: float = 0.0  # unix time of these values


class FleetFrame(NamedTuple):
    """The jobs of a folder, in their order, the number of all runs, and a note."""

    jobs: Sequence[JobLine] = ()
    num_runs: int = 0  # also ended ones
    note: str = ""


class Fleet:
    """Reads the summaries of running jobs in a folder of runs or of ledger files; a changed summary is read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[Path, tuple[str, JobLine | None]] = {}  # by run folder: state of its files, and its line
        self.frame = FleetFrame()

    def refresh(self, max_s: float, now_s: float) -> bool:
        """Read what has changed, for a limited time; return whether everything was read. ``now_s`` is the unix time."""
        deadline_s = time.monotonic() + max_s
        ledger, _ = ledger_runs(self._path)  # the runs in ledger files
        try:
            files = {run.folder: run.state for run in find_runs(self._path)}  # state of its files, by run folder
        except UnreadableRun:
            if not ledger:
                raise
            files = {}
        running = {Path(run.folder): run for run in ledger if run.folder and run.status == "running"}
        files |= {folder: "" for folder in running if folder not in files}  # only the ledger has these runs
        lines: dict[Path, tuple[str, JobLine | None]] = {}
        is_all_read = True
        for folder, state in files.items():
            old_line = self._lines.get(folder)
            if old_line is not None and state and old_line[0] == state:
                lines[folder] = old_line
            elif time.monotonic() > deadline_s:
                is_all_read = False
                break
            else:
                lines[folder] = state, _line_of_folder(folder) or _line_of_ledger(folder, running.get(folder))
        self._lines = lines
        jobs = [aged for _, job in lines.values() if job is not None and (aged := _aged(job, now_s)) is not None]
        note = "" if is_all_read else f"{len(lines):,} of {len(files):,} runs are read"
        jobs.sort(key=lambda job: (STATES.index(job.state), -job.lost_gpus, job.name))
        self.frame = FleetFrame(jobs, len(files), note)
        return is_all_read


def _line_of_folder(folder: Path) -> JobLine | None:
    """Return the line of a run; ``None`` if it is over, or cannot be read."""
    try:
        summary = read_record(folder / "summary.json", Summary)
    except Unreadable:
        return None
    if summary is None:
        return _line_without_summary(folder)
    if summary.is_over:
        return None
    gpus = summary.coverage.gpus_expected
    loss = summary.waterfall
    lost_share = loss.avoidable_seconds / loss.device_seconds if loss is not None and loss.device_seconds else 0.0
    values = {name: value.value if (value := summary.metrics.get(tag)) else None for name, tag in _TAG_OF_FIELD.items()}
    return JobLine(
        name=one_line(summary.run_id or folder.name),
        folder=str(folder),
        state="stalled" if summary.status == "stalled" else "running",
        user=summary.user,
        partition=summary.partition,
        gpus=gpus or None,
        elapsed_s=summary.elapsed_s,
        verdict=one_line(summary.verdict.text) if summary.verdict is not None else "",
        lost_gpus=lost_share * (gpus or 0),
        updated_time_s=summary.updated_time_s,
        **values,
    )


def _line_without_summary(folder: Path) -> JobLine | None:
    """Return the line of a run in its first minute, which has no summary yet."""
    try:
        identity = read_record(folder / "run.json", Identity)
    except Unreadable:
        return None
    if identity is None:
        return None
    name = one_line(identity.run_id or folder.name)
    return JobLine(name, str(folder), "starting", identity.user, identity.partition, updated_time_s=started_s(folder))


def _line_of_ledger(folder: Path, run: LedgerRun | None) -> JobLine | None:
    """Return the line of a run whose folder cannot be read, from the ledger: its values are up to an hour old."""
    if run is None:
        return None
    return JobLine(
        name=one_line(run.run_id),
        folder=str(folder),
        user=run.user,
        gpus=run.gpus,
        tokens_per_second_per_gpu=run.tokens_per_second_per_gpu,
        mfu_ratio=run.mfu_ratio,
        verdict=one_line((run.cause or "").replace("_", " ")),
        lost_gpus=(run.gpus or 0) * run.known_wasted_gpu_hours / run.gpu_hours if run.gpu_hours else 0.0,
        updated_time_s=(run.updated_time_s or 0.0) + STALE_AFTER_S,  # the next line of a run may be so late
    )


def _aged(line: JobLine, now_s: float) -> JobLine | None:
    """Return a line with the state that its age shows; ``None`` if the job has probably ended."""
    age_s = now_s - line.updated_time_s
    if age_s > ENDED_AFTER_S:
        return None
    return line._replace(state="no update") if age_s > NO_UPDATE_S else line


def fleet_lines(frame: FleetFrame, width: int, height: int, selected: int = 0) -> list[Line]:
    """Return a screen: the numbers, the jobs around the selected one, and the keys."""
    gpus = sum(job.gpus or 0 for job in frame.jobs)
    lost = sum(job.lost_gpus for job in frame.jobs)
    text = f"{len(frame.jobs):,} running jobs with {gpus:,} GPUs of {frame.num_runs:,} runs"
    losses = f"  avoidable losses: the time of {readable(lost)} GPUs" if lost else ""
    lines: list[Line] = [[(text, BOLD), (losses, WARNING)]]
    columns = [(column, cells) for column, cells, min_width in _COLUMNS if width >= min_width]  # names and widths
    used = _STATE_WIDTH + 1 + sum(cells + 1 for _, cells in columns)
    name_width = min(max(width - used - 1 - _MIN_VERDICT_WIDTH, _MIN_NAME_WIDTH), _MAX_NAME_WIDTH)
    head = f"{fit('run, most lost first', name_width)} {fit('state', _STATE_WIDTH)} "
    head += "".join(fit(column, cells, right=True) + " " for column, cells in columns) + " verdict"
    lines.append([(head, DIM)])
    num_shown = max(height - len(lines) - 1 - bool(frame.note), 1)
    first = max(min(selected - num_shown // 2, len(frame.jobs) - num_shown), 0)
    for index, job in enumerate(frame.jobs[first : first + num_shown], first):
        numbers = "".join(fit(_cell_text(job, column), cells, right=True) + " " for column, cells in columns)
        # Many names begin with the same date, so the end of a long name is shown.
        name_end = job.name if len(job.name) <= name_width else f"…{job.name[1 - name_width :]}"
        name, state = fit(name_end, name_width), fit(job.state, _STATE_WIDTH)
        if index == selected:
            lines.append([(fit(f"{name} {state} {numbers} {job.verdict}", width), REVERSE)])
            continue
        parts = (f"{name} ", PLAIN), (state, _STYLES.get(job.state, PLAIN)), (f" {numbers} ", PLAIN)
        lines.append([*parts, (one_line(job.verdict), PLAIN if job.lost_gpus < 1 else WARNING)])
    if not frame.jobs:
        lines.append([("no job is running", PLAIN)])
    lines += [[]] * (height - len(lines) - 1 - bool(frame.note))
    if frame.note:
        lines.append([(one_line(frame.note), DIM)])
    lines.append([(fit(KEYS, width), REVERSE)])
    return [clipped(line, width) for line in lines][:height]


def _cell_text(job: JobLine, column: str) -> str:
    if column in ("user", "partition"):
        return one_line(getattr(job, column) or "-")
    cells: dict[str, tuple[float | None, Callable[[float], str]]] = {
        "GPUs": (job.gpus, "{:,}".format),
        "lost": (job.lost_gpus if job.verdict else None, "{:.3g}".format),
        "tok/s/GPU": (job.tokens_per_second_per_gpu, lambda value: "".join(scaled(value))),
        "MFU": (job.mfu_ratio, "{:.1%}".format),
        "busy": (job.busy_ratio, "{:.0%}".format),
        "time": (job.elapsed_s, duration),
    }
    value, text_of = cells[column]
    return "-" if value is None else text_of(value)


def print_once(fleet: Fleet, width: int, *, as_json: bool) -> int:
    """Print all running jobs; return the exit status."""
    fleet.refresh(float("inf"), time.time())
    frame = fleet.frame
    if as_json:
        jobs = [job._asdict() for job in frame.jobs]
        print(json.dumps({"schema_version": DOCUMENT_VERSION, "runs": frame.num_runs, "jobs": jobs}))
    else:
        lines = fleet_lines(frame, width, len(frame.jobs) + 4, selected=-1)[:-1]  # without the line of keys
        sys.stdout.write(plain(line for line in lines if line))
    return 1 if any(job.state in ("stalled", "no update") for job in frame.jobs) else 0


def show(fleet: Fleet) -> int:
    """Show the jobs, and each job that the user opens, until the user quits; return the exit status."""
    locale.setlocale(locale.LC_ALL, "")
    fleet.refresh(MAX_READ_S, time.time())
    folder = ""
    while (chosen := _choose_job(fleet, folder)) is not None:
        folder = chosen.folder
        top_terminal.show(FolderSource(Path(folder)), one_line(folder))  # q and Ctrl-C come back to the list
    return 0


def _choose_job(fleet: Fleet, folder: str) -> JobLine | None:
    """Show the jobs, at first with the job of a folder selected, until one is chosen; ``None``: the user quits."""
    wake_read, wake_write = wake_pipe()
    is_over = threading.Event()
    # A slow disk must not delay a key.
    threading.Thread(target=_refresh_until_over, args=(fleet, is_over, lambda: wake(wake_write)), daemon=True).start()
    selected = next((index for index, job in enumerate(fleet.frame.jobs) if job.folder == folder), 0)
    try:
        with screen(wake_write) as canvas:
            while True:
                jobs, (width, height) = fleet.frame.jobs, canvas.size
                selected = min(max(selected, 0), max(len(jobs) - 1, 0))
                canvas.draw(fleet_lines(fleet.frame, width, height, selected))
                keys = canvas.wait_for_keys(wake_read, TICK_S)
                if keys is None:
                    return None
                for key in keys:
                    if key in ("q", "ctrl-c", "esc"):
                        return None
                    if key == "enter" and jobs:
                        return jobs[selected]
                    page = height - 4
                    selected += {"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -page, "pgdn": page}.get(key, 0)
                    selected = {"home": 0, "end": len(jobs) - 1}.get(key, selected)
    except KeyboardInterrupt:
        return None
    finally:
        is_over.set()


def _refresh_until_over(fleet: Fleet, is_over: threading.Event, wake_screen: Callable[[], None]) -> None:
    while not is_over.is_set():
        is_all_read = fleet.refresh(MAX_READ_S, time.time())
        wake_screen()
        is_over.wait(READ_EVERY_S if is_all_read else 0.01)
