"""The console: two or three lines per window on a terminal, otherwise the block for scripts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from effllm.config.setting_values import one_of
from effllm.config.switches import this_process
from effllm.records.events import ALWAYS, FILE, is_problem, level_of
from effllm.records.job import ClusterReport
from effllm.records.rank import Event
from effllm.sinks import Option, RunInfo
from effllm.store.closing_text import closing_text
from effllm.store.window_text import block_lines, short_lines

OPTIONS = {
    "format": Option(
        "auto",
        one_of("auto", "short", "full"),
        "Format of a window: two lines (short), or the block for scripts (full). "
        "auto: short on a terminal, otherwise full.",
    ),
}

#: Maximum number of different lines per kind of events; kinds of level ALWAYS have no limit.
MAX_EVENTS = 20

_HEADER, _PROBLEM, _PLAIN, _ERASE = "\x1b[1;36m", "\x1b[1;31m", "\x1b[0m", "\r\x1b[K"
_ASCII = str.maketrans({"·": "|", "…": "...", "±": "+-", "µ": "u"})


def open_sink(run: RunInfo) -> Console:
    return Console(run)


class Console:
    """Prints each window once, with one write."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._out = run.stdout
        environment = this_process()
        self._terminal = run.stdout.isatty() and environment.get("TERM") != "dumb"
        self._colour = self._terminal and not environment.get("NO_COLOR")
        form = run.options["format"]
        self._is_short = self._terminal if form == "auto" else form == "short"
        self._lost = 0
        self._shown: dict[str, set[str]] = {}  # texts of printed events, by kind
        self._is_closed = False

    def write(self, report: ClusterReport) -> None:
        """Print a window, except corrections and windows without an iteration."""
        if report.correction or report.iteration_last < report.iteration_first:
            return
        width = _width(self._out) if self._terminal else 0
        if self._is_short:
            lines, problem = short_lines(report, width or 80, lost_before=self._lost)
            self._put([*lines, self._coloured(_PROBLEM, problem)] if problem else lines)
        else:
            lines = block_lines(report, width)
            self._put([self._coloured(_HEADER, line) if line.startswith("[") else line for line in lines])
        self._lost = report.coverage.reports_lost

    def event(self, event: Event) -> None:
        """Print an event, according to the level of its kind."""
        level = level_of(event.kind)
        text = " ".join("".join(c if c.isprintable() else " " for c in event.text).split())
        if level != ALWAYS:
            shown = self._shown.setdefault(event.kind, set())
            if level == FILE or text in shown or len(shown) > MAX_EVENTS:
                return
            shown.add(text)
            if len(shown) > MAX_EVENTS:
                text = f"more events of kind {event.kind} are in events.jsonl of the run folder"
        line = f"[EfficientLLM] {text}" + (f" ({event.count} events)" if event.count > 1 else "")
        self._put([self._coloured(_PROBLEM, line) if is_problem(event.kind) else line])

    def close(self) -> None:
        """Print the closing table; the stream stays open for the training."""
        summary = None if self._is_closed else self._run.summary()
        self._is_closed = True
        if summary is not None:
            self._put(
                closing_text(summary, self._run.folder, self._run.tensorboard_dir, is_cut=self._terminal).splitlines()
            )

    def _coloured(self, colour: str, line: str) -> str:
        return f"{colour}{line}{_PLAIN}" if self._colour else line

    def _put(self, lines: Sequence[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        if self._terminal:
            # A progress bar of the training may have left the cursor inside a line. One space per column of the
            # terminal moves the cursor from inside a line to the next line, but not from the start of a line (zsh's
            # PROMPT_SP).
            text = " " * _width(self._out) + _ERASE + text
        self._out.write(_encodable(text, self._out))
        self._out.flush()


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
