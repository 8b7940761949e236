"""A thread that reads a source for ``effllm top``: a slow disk or network delays no key and no frame."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from effllm.analysis.run_folders import UnreadableRun
from effllm.views.top.frame import TopFrame
from effllm.views.top.view_state import Action, Order

FRAME_AT_LEAST_EVERY_S = 10.0  # also while nothing is new, because a frame has the age of its values


class TopSource(Protocol):
    """A run folder or a metrics page.  All methods may block."""

    every_s: float
    has_more: bool

    def refresh(self) -> bool:
        """Read what is new; return whether something is."""

    def refresh_hosts(self) -> bool:
        """Read what is needed only after the first frame; return whether it is new."""

    def move(self, kind: str, amount: float = 0.0) -> None:
        """Move the position in the run."""

    def frame(self, now_s: float) -> TopFrame:
        """Return the values at the position."""


def ordered_frame(source: TopSource, order: Order) -> TopFrame:
    """Return the values at the position, with the table in an order."""
    frame = source.frame(time.time())
    return frame._replace(lines=frame.ranks.ordered(*order))


class TopReader:
    """Reads a source in a thread, keeps the newest frame, and calls ``wake`` in the thread after each new one."""

    def __init__(self, source: TopSource, wake: Callable[[], None]) -> None:
        self._source, self._wake = source, wake
        self._changed = threading.Condition()
        self._requested_moves: list[Action] = []  # of the position, not yet made
        self._requested_order = Order()  # of the table of ranks or hosts
        self._frame_monotonic_s, self._frame_order = 0.0, Order()  # of the newest frame
        self._read_start_s: float | None = None  # monotonic time at which the current read began
        self.frame: TopFrame | None = None
        self.error = ""  # why the last read failed; a new frame clears it
        self.error_class: type[UnreadableRun] = UnreadableRun  # of the error
        self.is_unusable = False  # whether the source was unreadable before the first frame, which ends the thread
        self._is_closed = False
        self._thread = threading.Thread(target=self._read_until_closed, name="top-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current read, without waiting for it: a disk may never answer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def request(self, action: Action) -> None:
        """Move the position; steps that wait for a slow disk become one step."""
        with self._changed:
            if action.kind == "step" and self._requested_moves and self._requested_moves[-1].kind == "step":
                action = Action("step", action.amount + self._requested_moves.pop().amount)
            self._requested_moves.append(action)
            self._changed.notify()

    def set_order(self, order: Order) -> None:
        with self._changed:
            if order != self._requested_order:
                self._requested_order = order
                self._changed.notify()

    @property
    def silent_s(self) -> float:
        """How long the source has not answered."""
        start_s = self._read_start_s
        return 0.0 if start_s is None else time.monotonic() - start_s

    def _read_until_closed(self) -> None:
        while not (self.is_unusable or self._is_closed):
            with self._changed:
                moves, self._requested_moves = self._requested_moves, []
                order = self._requested_order
                is_old = time.monotonic() >= self._frame_monotonic_s + FRAME_AT_LEAST_EVERY_S
                is_frame_due = self.frame is None or is_old or order != self._frame_order or bool(moves or self.error)
            self._read_start_s = time.monotonic()
            try:
                self._move_and_read(moves, order, is_frame_due)
            except UnreadableRun as error:
                self.error, self.error_class, self.is_unusable = str(error), type(error), self.frame is None
                self._wake()
            except OSError as error:
                self.error = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
                self._wake()
            self._read_start_s = None
            with self._changed:
                is_same_order = self._requested_order == self._frame_order
                is_idle = not self._requested_moves and not self._source.has_more and is_same_order
                if (is_idle or self.error) and not self._is_closed:  # after an error, the source gets time
                    self._changed.wait(self._source.every_s)

    def _move_and_read(self, moves: list[Action], order: Order, is_frame_due: bool) -> None:
        """Move the position and read; make a frame if anything is new or a frame is due."""
        for action in moves:
            self._source.move(*action)
        if not (self._source.refresh() or is_frame_due):
            return
        self._make_frame(order)
        if self._source.refresh_hosts():
            self._make_frame(order)

    def _make_frame(self, order: Order) -> None:
        self.frame, self.error = ordered_frame(self._source, order), ""
        self._frame_monotonic_s, self._frame_order = time.monotonic(), order
        self._wake()
