"""The console: one line per window on a terminal, otherwise the block for scripts."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from effllm.config.setting_values import one_of
from effllm.config.switches import process_environ
from effllm.records.events import ALWAYS, FILE, is_problem, level_of
from effllm.records.facts import PROGRESS_BARS
from effllm.records.job import ClusterReport
from effllm.records.rank import Event
from effllm.sinks import Option, RunInfo
from effllm.views.text.closing import closing_text
from effllm.views.text.window import block_lines, console_line

OPTIONS = {
    "format": Option(
        "auto",
        one_of("auto", "line", "block"),
        "Format of a window: one line, or the block that users' scripts parse. auto: a line on a terminal, otherwise "
        "the block.",
    ),
}

#: Maximum number of different lines per kind of events, before a last one; kinds of level ALWAYS have no limit.
MAX_EVENTS = 20
MAX_LINE_LETTERS = 200  # of a window's line in a file

_CYAN, _RED, _PLAIN, _ERASE_LINE = "\x1b[1;36m", "\x1b[1;31m", "\x1b[0m", "\r\x1b[K"


def open_sink(run: RunInfo) -> Console:
    return Console(run)


class Console:
    """Prints each window once, with one write."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._out = run.stdout
        environment = process_environ()
        self._is_terminal = run.stdout.isatty() and environment.get("TERM") != "dumb"
        self._has_colour = self._is_terminal and not environment.get("NO_COLOR")
        window_format = run.options["format"]
        self._prints_line = self._is_terminal if window_format == "auto" else window_format == "line"
        self._printed: dict[str, set[str]] = {}  # texts of printed events, by kind
        self._is_closed = False

    def write(self, report: ClusterReport) -> None:
        """Print a window, except corrections and windows without an iteration."""
        if report.correction or report.iteration_last < report.iteration_first:
            return
        width = _terminal_width(self._out) if self._is_terminal else 0
        lines = [console_line(report, width or MAX_LINE_LETTERS)] if self._prints_line else block_lines(report, width)
        self._print([self._coloured(_CYAN, line) if line.startswith("[") else line for line in lines])

    def event(self, event: Event) -> None:
        """Print an event, according to the level of its kind."""
        level = level_of(event.kind)
        text = " ".join("".join(c if c.isprintable() else " " for c in event.text).split())
        if level != ALWAYS:
            printed = self._printed.setdefault(event.kind, set())
            if level == FILE or text in printed or len(printed) > MAX_EVENTS:
                return
            printed.add(text)
            if len(printed) > MAX_EVENTS:
                text = f"more events of kind {event.kind} are in events.jsonl of the run folder"
        line = f"[EfficientLLM] {text}" + (f" ({event.count} events)" if event.count > 1 else "")
        self._print([self._coloured(_RED, line) if is_problem(event.kind) else line])

    def close(self) -> None:
        """Print the closing table; the stream stays open for the training."""
        summary = None if self._is_closed else self._run.summary()
        self._is_closed = True
        if summary is not None:
            text = closing_text(summary, self._run.folder, self._run.tensorboard_dir, is_cut=self._is_terminal)
            self._print(text.splitlines())

    def _coloured(self, colour: str, line: str) -> str:
        return f"{colour}{line}{_PLAIN}" if self._has_colour else line

    def _print(self, lines: Sequence[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        if self._is_terminal:
            # A progress bar of the training may have left the cursor inside a line. One space per column of the
            # terminal moves the cursor from inside a line to the next line, but not from the start of a line (zsh's
            # PROMPT_SP).
            text = " " * _terminal_width(self._out) + _ERASE_LINE + text
        elif _is_inside_line(self._out, bool(self._run.fact(PROGRESS_BARS))):
            text = f"\n{text}"
        self._out.write(text)
        self._out.flush()


def _terminal_width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _is_inside_line(stream: TextIO, has_bars: bool) -> bool:
    """Whether the last line of a file has no end, because it is a progress bar of the training.

    A pipe cannot be read: it may end with a bar if stderr, to which bars are written, is the same pipe.
    """
    try:
        state = os.fstat(stream.fileno())
        if not stat.S_ISREG(state.st_mode):
            return has_bars and os.path.samestat(state, os.fstat(2))
        with Path(f"/proc/self/fd/{stream.fileno()}").open("rb") as file:
            file.seek(max(state.st_size - 1, 0))
            return file.read(1) not in (b"", b"\n")
    except (OSError, ValueError):
        return False
