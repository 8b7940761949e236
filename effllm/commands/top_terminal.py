"""The terminal of ``effllm top``: keys, resizes and signals come in, changed lines go out.

curses writes only the cells that changed, and restores the terminal, also after an exception or SIGTERM.
"""

from __future__ import annotations

import contextlib
import curses
import functools
import itertools
import locale
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from effllm.commands.top_reader import TopReader, TopSource
from effllm.config.switches import process_environ
from effllm.views.top.frame import TopFrame
from effllm.views.top.panes import num_lines_of
from effllm.views.top.screen import page_height, render
from effllm.views.top.text import ASCII_BARS, BAD, BARS, BOLD, DIM, GOOD, PLAIN, REVERSE, WARNING, Line, clipped
from effllm.views.top.view_state import QUIT, SPEEDS, Action, ShownPane, TopView, after_key

SLOW_S = 2.0  # after this time without an answer, the screen reports a slow source
TICK_S = 1.0  # the longest wait for a key before the screen is drawn again
STOPPED = 130
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_KEYS = {
    "\x1b": "esc",
    "\n": "enter",
    "\r": "enter",
    "\t": "tab",
    " ": "space",
    "\x7f": "backspace",
    "\b": "backspace",
    "\x03": "ctrl-c",
}
_CODES = {
    curses.KEY_UP: "up",
    curses.KEY_DOWN: "down",
    curses.KEY_LEFT: "left",
    curses.KEY_RIGHT: "right",
    curses.KEY_HOME: "home",
    curses.KEY_END: "end",
    curses.KEY_PPAGE: "pgup",
    curses.KEY_NPAGE: "pgdn",
    curses.KEY_BACKSPACE: "backspace",
    curses.KEY_ENTER: "enter",
}


def can_move_cursor(term: str) -> bool:
    """Whether a terminal of this type can move its cursor; the type ``dumb`` cannot."""
    try:
        curses.setupterm(term or "dumb", sys.stdout.fileno())
    except curses.error:
        return False
    return bool(curses.tigetstr("cup"))


def show(source: TopSource, name: str) -> int:
    """Show a source until the user quits; return the exit status."""
    locale.setlocale(locale.LC_ALL, "")
    sys.setswitchinterval(0.001)  # the thread that decodes lines must not delay a key
    wake_read, wake_write = wake_pipe()
    reader = TopReader(source, lambda: wake(wake_write))
    reader.start()
    try:
        with screen(wake_write) as canvas:
            return _Terminal(canvas, reader, name, wake_read).run()
    finally:
        reader.close()


@functools.cache
def wake_pipe() -> tuple[int, int]:
    """Return the ends of the pipe that wakes all screens: the thread of an earlier screen may still write to it."""
    return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)


def wake(descriptor: int) -> None:
    """Write a byte into a pipe that a loop waits for."""
    with contextlib.suppress(BlockingIOError):  # the pipe is full: it will be read
        os.write(descriptor, b"f")  # not the number of a signal


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def screen(wake_write: int) -> Iterator[Canvas]:
    """Take over the terminal: SIGTERM and SIGHUP end the view, and a changed size of the terminal wakes it."""
    old_handlers = {number: signal.signal(number, _exit_on_signal) for number in _SIGNALS}
    old_handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: None)
    old_descriptor = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)  # gets the number of each signal
    try:
        window = curses.initscr()
        curses.noecho()
        curses.cbreak()
        curses.set_escdelay(25)
        with contextlib.suppress(curses.error):  # some terminals cannot hide the cursor
            curses.curs_set(0)
        window.keypad(True)
        window.nodelay(True)
        yield Canvas(window)
    finally:
        with contextlib.suppress(curses.error):
            curses.endwin()
        signal.set_wakeup_fd(old_descriptor)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


class Canvas:
    """The window of curses: lines go out, keys come in."""

    def __init__(self, window: Any) -> None:
        self._window, self._attributes = window, _attributes_by_style()
        self._shown: list[Line] = []  # lines on the screen
        is_unicode = locale.nl_langinfo(locale.CODESET).upper() == "UTF-8"
        self.bars, self._encoding = (BARS, "utf-8") if is_unicode else (ASCII_BARS, "ascii")

    @property
    def size(self) -> tuple[int, int]:
        """Number of columns and of lines."""
        height, width = self._window.getmaxyx()
        return width, height

    def wait_for_keys(self, wake_read: int, timeout_s: float) -> Iterable[str] | None:
        """Wait for a key, a byte in a pipe or the timeout; return names of keys; ``None``: stdin is closed."""
        ready, _, _ = select.select([sys.stdin, wake_read], [], [], timeout_s)
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                if signal.SIGWINCH in os.read(wake_read, 4096):
                    self._resize()
        keys = self._pressed_keys() if sys.stdin in ready else iter(())
        first = next(keys, None)
        if sys.stdin in ready and first is None and not os.isatty(sys.stdin.fileno()):  # it is closed
            return None
        return () if first is None else itertools.chain([first], keys)

    def _pressed_keys(self) -> Iterator[str]:
        with contextlib.suppress(curses.error):  # no more keys
            while True:
                key = self._window.get_wch()
                yield _CODES.get(key, "") if isinstance(key, int) else _KEYS.get(key, key)

    def _resize(self) -> None:
        width, height = os.get_terminal_size(sys.stdout.fileno())
        curses.resizeterm(height, width)
        self._window.clear()
        self._shown = []

    def draw(self, lines: list[Line]) -> None:
        """Write the lines that differ from the lines on the screen."""
        for row, line in enumerate(lines):
            if row < len(self._shown) and self._shown[row] == line:
                continue
            self._window.move(row, 0)
            self._window.clrtoeol()
            for text, style in line:
                shown = text.encode(self._encoding, "replace").decode(self._encoding)
                with contextlib.suppress(curses.error):  # the cursor cannot move behind the last cell
                    self._window.addstr(shown, self._attributes[style])
        self._shown = lines
        self._window.refresh()


class _Terminal:
    """The screen with the choices of the user; the pipe ``wake_read`` gets a byte for each new frame and signal."""

    def __init__(self, canvas: Canvas, reader: TopReader, name: str, wake_read: int) -> None:
        self._canvas, self._reader, self._name, self._wake_read = canvas, reader, name, wake_read
        self._view = TopView()
        self._next_step_s = 0.0  # monotonic time of the next step of a replay
        self._last_played_frame: TopFrame | None = None  # the frame at the last step

    def run(self) -> int:
        try:
            while True:
                self._draw()
                if self._reader.is_unusable:
                    raise self._reader.error_class(self._reader.error)
                if self._handle_keys():
                    return 0
        except KeyboardInterrupt:
            return STOPPED

    def _handle_keys(self) -> bool:
        """Wait for keys, a frame, a signal or the timeout, and apply the keys; return whether the user quits."""
        timeout_s = TICK_S
        if self._view.is_playing:
            timeout_s = min(max(self._next_step_s - time.monotonic(), 0.0), TICK_S)
        keys = self._canvas.wait_for_keys(self._wake_read, timeout_s)
        if keys is None:
            return True
        for key in keys:
            self._view, action = after_key(self._view, key, self._shown_pane())
            if action == QUIT:
                return True
            if action is not None:
                self._last_played_frame = self._reader.frame
                self._reader.request(action)
            self._reader.set_order(self._view.order)
        self._play_next_window()
        return False

    def _shown_pane(self) -> ShownPane:
        frame = self._reader.frame
        if frame is None:
            return ShownPane()
        width, height = self._canvas.size
        num_lines_shown = page_height(frame, width, height, self._view)
        return ShownPane(
            num_lines_shown, num_lines_of(frame, self._view, width), frame.place.is_newest, frame.head.is_over
        )

    def _play_next_window(self) -> None:
        """Request the next window of a replay; a slow disk slows the replay."""
        frame, now_s = self._reader.frame, time.monotonic()
        if not self._view.is_playing or frame is None or frame is self._last_played_frame or now_s < self._next_step_s:
            return
        self._next_step_s, self._last_played_frame = now_s + 1 / SPEEDS[self._view.speed], frame
        if frame.place.is_newest:
            self._view = self._view._replace(is_playing=False)
        else:
            self._reader.request(Action("step", 1))

    def _draw(self) -> None:
        frame, (width, height) = self._reader.frame, self._canvas.size
        notice = f"older values are shown: {self._reader.error}" if self._reader.error else ""
        if (silent_s := self._reader.silent_s) >= SLOW_S:
            notice = f"no answer for {silent_s:.0f} s from {self._name}"
        if frame is None:
            lines: list[Line] = [clipped([(notice or f"reading {self._name}", PLAIN)], width)]
        else:
            lines = render(frame, self._view, width, height, notice, self._canvas.bars)
        self._canvas.draw([*lines, *([[]] * (height - len(lines)))])


def _attributes_by_style() -> dict[int, int]:
    """Return the attributes of curses for each style; without colour, problems are bold."""
    styles = {
        PLAIN: curses.A_NORMAL,
        BOLD: curses.A_BOLD,
        DIM: curses.A_DIM,
        GOOD: curses.A_NORMAL,
        WARNING: curses.A_BOLD,
        BAD: curses.A_BOLD,
        REVERSE: curses.A_REVERSE,
    }
    if process_environ().get("NO_COLOR"):
        return styles
    with contextlib.suppress(curses.error):
        curses.start_color()
        curses.use_default_colors()
        colors = (GOOD, curses.COLOR_GREEN), (WARNING, curses.COLOR_YELLOW), (BAD, curses.COLOR_RED)
        for number, (style, color) in enumerate(colors, start=1):
            curses.init_pair(number, color, -1)
            styles[style] = curses.color_pair(number) | (curses.A_BOLD if style == BAD else 0)
    return styles
