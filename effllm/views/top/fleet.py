"""The running jobs of a folder as lines of one screen, the worst first. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from effllm.records.plain_text import one_line
from effllm.store.summary_text import duration, readable
from effllm.store.window_text import scaled
from effllm.views.top.text import BAD, BOLD, DIM, GOOD, PLAIN, REVERSE, WARNING, Line, clipped, fit

#: States, the worst first.
STATES = ("stalled", "no update", "running", "starting")
_STYLES = {"stalled": BAD, "no update": WARNING, "running": GOOD}
KEYS = "enter opens the job  up down  q quit"


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

    def order(self) -> tuple[Any, ...]:
        return STATES.index(self.state), -self.lost_gpus, self.name


class FleetFrame(NamedTuple):
    """The jobs of a folder, in their order, and what is to be said of them."""

    jobs: Sequence[JobLine] = ()
    num_runs: int = 0  # also ended ones
    note: str = ""


#: Columns: name, width, and width from which on the screen has them.
_COLUMNS = (("user", 9, 70), ("partition", 9, 110), ("GPUs", 6, 0), ("tok/s/GPU", 9, 0), ("MFU", 6, 0), ("busy", 5, 0),
            ("time", 9, 120))  # fmt: skip
_STATE, _MIN_NAME, _MAX_NAME = 9, 10, 28


def fleet_lines(frame: FleetFrame, width: int, height: int, selected: int = 0) -> list[Line]:
    """Return a screen: the numbers, the jobs around the selected one, and the keys."""
    gpus = sum(job.gpus or 0 for job in frame.jobs)
    lost = sum(job.lost_gpus for job in frame.jobs)
    text = f"{len(frame.jobs):,} running jobs with {gpus:,} GPUs of {frame.num_runs:,} runs"
    losses = f"  losses that can be avoided: {readable(lost)} GPUs" if lost else ""
    lines: list[Line] = [[(text, BOLD), (losses, WARNING)]]
    columns = [(name, cells) for name, cells, at_least in _COLUMNS if width >= at_least]
    used = _STATE + 1 + sum(cells + 1 for _, cells in columns)
    name = min(max(width - used - 30, _MIN_NAME), _MAX_NAME)
    head = f"{fit('run', name)} {fit('state', _STATE)} "
    head += "".join(fit(text, cells, right=True) + " " for text, cells in columns) + " verdict"
    lines.append([(head, DIM)])
    room = max(height - len(lines) - 1 - bool(frame.note), 1)
    first = max(min(selected - room // 2, len(frame.jobs) - room), 0)
    for at, job in enumerate(frame.jobs[first : first + room], first):
        numbers = "".join(fit(_cell(job, column), cells, right=True) + " " for column, cells in columns)
        if at == selected:
            whole = f"{fit(job.name, name)} {fit(job.state, _STATE)} {numbers} {job.verdict}"
            lines.append([(fit(whole, width), REVERSE)])
            continue
        style = _STYLES.get(job.state, PLAIN)
        parts = (f"{fit(job.name, name)} ", PLAIN), (fit(job.state, _STATE), style), (f" {numbers} ", PLAIN)
        lines.append([*parts, (one_line(job.verdict), PLAIN if job.lost_gpus < 1 else WARNING)])
    if not frame.jobs:
        lines.append([("no job is running", PLAIN)])
    lines += [[]] * (height - len(lines) - 1 - bool(frame.note))
    if frame.note:
        lines.append([(one_line(frame.note), DIM)])
    lines.append([(fit(KEYS, width), REVERSE)])
    return [clipped(line, width) for line in lines][:height]


def _cell(job: JobLine, column: str) -> str:
    if column in ("user", "partition"):
        return one_line(getattr(job, column) or "-")
    cells: dict[str, tuple[float | None, Callable[[float], str]]] = {
        "GPUs": (job.gpus, "{:,}".format),
        "tok/s/GPU": (job.tokens_per_second_per_gpu, lambda value: "".join(scaled(value))),
        "MFU": (job.mfu_ratio, "{:.1%}".format),
        "busy": (job.busy_ratio, "{:.0%}".format),
        "time": (job.elapsed_s, duration),
    }
    value, text = cells[column]
    return "-" if value is None else text(value)
