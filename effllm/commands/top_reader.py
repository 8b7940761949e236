"""A thread that reads a source for ``effllm top``: a slow disk or network delays no key and no frame."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from effllm.analysis.run_folders import UnreadableRun
from effllm.views.top.frame import TopFrame
from effllm.views.top.view_state import Action, Order

#: Period of frames while nothing is new: the age of a run that does not continue changes.
FRAME_AT_LEAST_EVERY_S = 10.0


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
        self._moves: list[Action] = []
        self._order = Order()
        self._frame_time_s, self._frame_order = 0.0, Order()  # of the newest frame
        self._busy_since_s: float | None = None
        self.frame: TopFrame | None = None
        self.error = ""
        self.error_class: type[UnreadableRun] = UnreadableRun  # of the error
        self.is_unusable = False  # whether there is nothing to show, and will not be
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
            if action.kind == "step" and self._moves and self._moves[-1].kind == "step":
                action = Action("step", action.amount + self._moves.pop().amount)
            self._moves.append(action)
            self._changed.notify()

    def set_order(self, order: Order) -> None:
        with self._changed:
            if order != self._order:
                self._order = order
                self._changed.notify()

    @property
    def silent_s(self) -> float:
        """How long the source has not answered."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def _read_until_closed(self) -> None:
        while not (self.is_unusable or self._is_closed):
            with self._changed:
                moves, self._moves = self._moves, []
                order = self._order
                is_old = time.monotonic() >= self._frame_time_s + FRAME_AT_LEAST_EVERY_S
                is_due = self.frame is None or is_old or order != self._frame_order
            self._busy_since_s = time.monotonic()
            try:
                self._move_and_read(moves, order, is_due)
            except UnreadableRun as error:
                self.error, self.error_class, self.is_unusable = str(error), type(error), self.frame is None
                self._wake()
            except OSError as error:
                self.error = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
                self._wake()
            self._busy_since_s = None
            with self._changed:
                is_idle = not self._moves and not self._source.has_more and self._order == self._frame_order
                if (is_idle or self.error) and not self._is_closed:
                    self._changed.wait(self._source.every_s)

    def _move_and_read(self, moves: list[Action], order: Order, is_due: bool) -> None:
        for action in moves:
            self._source.move(*action)
        if not (self._source.refresh() or moves or is_due or self.error):
            return
        self._make_frame(order)
        if self._source.refresh_hosts():
            self._make_frame(order)

    def _make_frame(self, order: Order) -> None:
        self.frame, self.error = ordered_frame(self._source, order), ""
        self._frame_time_s, self._frame_order = time.monotonic(), order
        self._wake()
