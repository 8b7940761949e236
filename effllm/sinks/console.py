"""The console: the block that scripts parse, a line for the person who watches, and a table at the end."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from effllm import metrics
from effllm.events import ALWAYS, FILE, level_of
from effllm.runs.summary_text import duration, errors_text, readable, rounded_up, summary_text
from effllm.schema import ClusterReport, Event, RankReport, Summary
from effllm.sinks import Run
from effllm.switches import this_process

#: Lines of events that are shown once each; those of level ALWAYS come on top of them.
MOST_EVENTS = 20
MOST_NAMED = 8

#: A rank is named as slowest from this much above the median on.
_SLOWER = 0.01
#: Energy that power was filled in for is named from this share of it on.
_ESTIMATED = 0.001

_HEADER, _PLAIN, _ERASE = "\x1b[1;36m", "\x1b[0m", "\r\x1b[2K"
_ASCII = str.maketrans({"·": "|", "█": "#", "░": ".", "…": "...", "±": "+-"})

_WATCHED: tuple[tuple[metrics.Formula, Callable[[float], str], str], ...] = (
    (metrics.seconds_per_iteration, readable, "{} s/{step}"),
    (metrics.tokens_per_second_per_gpu, readable, "{} tok/s/{device}"),
    (metrics.mfu_ratio, lambda ratio: readable(100 * ratio), "MFU {} %"),
    (metrics.watts_per_gpu, readable, "{} W/GPU"),
    (metrics.joules_per_token, readable, "{} J/token"),
    (metrics.peak_gb, readable, "peak {} GiB"),
    (metrics.data_wait_ratio, lambda ratio: f"{100 * ratio:.0f}", "data {} %"),
    (metrics.exposed_communication_ratio, lambda ratio: f"{100 * ratio:.0f}", "exposed comm {} %"),
)


def open_sink(run: Run) -> Console:
    """Open the console."""
    return Console(run)


class Console:
    """Prints each window once, in one write; on a terminal a progress line stands below the last block."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._out = run.stdout
        environment = this_process()
        self._terminal = run.stdout.isatty() and environment.get("TERM") != "dumb"
        self._colour = self._terminal and not environment.get("NO_COLOR")
        self._progress = ""
        self._told: set[str] = set()
        self._summarized = "running"

    def write(self, report: ClusterReport, rows: Sequence[RankReport]) -> None:  # noqa: ARG002
        """Print one window, unless it holds no iteration or corrects one that was printed."""
        if report.correction or report.iteration_last < report.iteration_first:
            return
        width = _width(self._out) if self._terminal else 0
        lines = _folded(list(watched(report)), " · ", width)
        if report.warming_up:
            lines.append("  (warming up: run-to-date values start later)")
        else:
            header, *values = block(report)
            lines += [f"{_HEADER}{header}{_PLAIN}" if self._colour else header, *values]
        lines += [f"  {line}" for line in _folded(list(coverage_parts(report)), "  ", width and width - 2)]
        progress = progress_line(report, _width(self._out)) if self._terminal and not report.final else ""
        self._put(lines, progress)

    def event(self, event: Event) -> None:
        """Print an event as often as the registry says for its kind."""
        level = level_of(event.kind)
        text = " ".join("".join(c if c.isprintable() else " " for c in event.text).split())
        if level == ALWAYS:
            self._put([f"[EfficientLLM] {text}"], self._progress)
            return
        if level == FILE or text in self._told or len(self._told) > MOST_EVENTS:
            return
        self._told.add(text)
        if len(self._told) > MOST_EVENTS:
            text = "more of this is in events.jsonl of the run folder"
        self._put([f"[EfficientLLM] {text}"], self._progress)

    def summarize(self, summary: Summary) -> None:
        """Print the final table when the run is over."""
        if not summary.is_over or summary.status in ("running", self._summarized):
            return
        self._summarized = summary.status
        charts = self._run.tensorboard_dir if "tensorboard" in self._run.config.sinks else None
        self._put(summary_text(summary, self._run.folder, charts).splitlines(), "")

    def update_facts(self, facts: dict[str, Any]) -> None:
        """Take nothing: facts are in run.json."""

    def close(self) -> None:
        """Take the progress line away."""
        if self._progress:
            self._put([], "")

    def _put(self, lines: Sequence[str], progress: str) -> None:
        text = "".join(f"{line}\n" for line in lines)
        if self._progress:
            text = _ERASE + text
        if progress:
            # The cursor goes back to the margin, so that what the training prints next starts there.
            text += f"{progress}\r"
        self._progress = progress
        self._out.write(_encodable(text, self._out))
        self._out.flush()


def watched(report: ClusterReport) -> Iterator[str]:
    """Yield the parts of the last window's line, for the person who watches; what is unknown is left out."""
    last = report.last
    words = {"step": "it" if report.style == "Iteration" else "step", "device": "GPU" if last.gpus else "rank"}
    yield report.style.lower() + " " + _place(report)
    if report.loss is not None and not math.isfinite(report.loss):
        yield "loss is not finite"
    errors = errors_text(metrics.timing_error_ratio(last), metrics.sensor_error_ratio(last))
    # They hold for the power as well, and stand behind it where no tokens are known.
    told_by = metrics.watts_per_gpu if metrics.joules_per_token(last) is None else metrics.joules_per_token
    for formula, to_text, template in _WATCHED:
        value = formula(last)
        if value is not None and math.isfinite(value):
            text = template.format(to_text(value), **words)
            yield f"{text} {errors}" if errors and formula is told_by else text
    slowest = report.straggler
    if slowest is not None and slowest.median_s > 0:
        slower = slowest.time_s / slowest.median_s - 1
        if slower >= _SLOWER:
            yield f"slowest rank {slowest.rank} +{100 * slower:.0f} %"
    if report.remaining_s is not None:
        yield f"eta {duration(report.remaining_s)}"


def block(report: ClusterReport) -> Iterator[str]:
    """Yield the lines that other people's scripts parse: fixed labels and formats, no line for what is unknown."""
    yield f"[EfficientLLM Metrics] {report.style} {report.iteration}:"
    if report.loss is not None and math.isfinite(report.loss):
        yield f"  Loss: {report.loss:.6f}"
    for entry in metrics.headline():
        value = report.values.get(entry.tag("run"))
        if entry.console and value is not None and math.isfinite(value):
            yield "  " + entry.console.format(value)


def coverage_parts(report: ClusterReport) -> Iterator[str]:
    """Yield how much of the job the block stands on."""
    seen, run = report.coverage, report.run
    yield f"Ranks: {seen.ranks_reporting}/{seen.ranks_expected}"
    yield f"GPUs: {seen.gpus_measured}/{seen.gpus_expected}"
    yield f"lost {seen.reports_lost}"
    yield f"late {seen.reports_late}"
    if report.power_scope and (report.last.energy_measured_j is not None or run.energy_measured_j is not None):
        yield f"scope {report.power_scope}"
    if run.energy_j and (share := (run.energy_estimated_j or 0.0) / run.energy_j) >= _ESTIMATED:
        yield f"estimated {rounded_up(100 * share)} %"
    if seen.missing_ranks:
        named = ",".join(str(rank) for rank in seen.missing_ranks[:MOST_NAMED])
        yield f"missing {named}" + ("…" if len(seen.missing_ranks) > MOST_NAMED else "")
    if report.simulated:
        yield "simulated"


def progress_line(report: ClusterReport, width: int) -> str:
    """Return where the job stands, in less than ``width`` columns."""
    text = f"{report.style.lower()} {_place(report)}"
    if report.remaining_s is not None:
        text += f"  {duration(report.remaining_s)} left"
    if report.total_iterations:
        done = min(report.iteration / report.total_iterations, 1.0)
        text = f"{100 * done:3.0f} %  {text}"
        room = min(width - 1 - len(text) - 2, 40)
        if room >= 8:
            filled = int(done * room)
            text = "█" * filled + "░" * (room - filled) + "  " + text
    return text[: width - 1]


def _place(report: ClusterReport) -> str:
    return f"{report.iteration}/{report.total_iterations}" if report.total_iterations else str(report.iteration)


def _folded(parts: Sequence[str], between: str, width: int) -> list[str]:
    """Join the parts, broken between parts where a line would pass ``width``; 0 means never."""
    lines = [parts[0]]
    for part in parts[1:]:
        if width and len(lines[-1]) + len(between) + len(part) > width:
            lines.append(f"  {part}")
        else:
            lines[-1] += between + part
    return lines


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    return text
