"""The events of one agent: limited in number, written to its log file, and stored until they are sent.

Missing metrics are also written to the job's terminal: once per host.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from pathlib import Path

from msgspec.structs import replace

from effllm.agent.trainer import Trainer
from effllm.config.settings import state_folder
from effllm.records.events import EventLimit
from effllm.records.rank import MAX_EVENT_COUNT, MAX_TEXT, Event
from effllm.store import own_files

NO_AGGREGATOR_AFTER_S = 10.0
CLOSE_S = 0.5  # maximum wait for the log file at the end
MAX_UNSENT = 200


class LogFile:
    """A file with one line per event; until the run folder is known, the lines are kept in memory.

    A thread writes the file: the agent must not wait for a hanging disk.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # `AgentEvents` limits their number
        self._thread: threading.Thread | None = None

    def add_line(self, event: Event) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(event.time_s))
        count_text = f" ({event.count} events)" if event.count > 1 else ""
        self._lines.put(f"{stamp}Z rank {self._rank}: {event.text}{count_text}\n")

    def start_writing(self, folder: Path) -> None:
        """Start the thread that writes to a file in ``folder``; the first line creates the file."""
        if self._thread is None:
            path = folder / f"agent-{self._rank}.log"
            self._thread = threading.Thread(target=self._write_lines, args=(path,), name="log", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the remaining lines; wait at most `CLOSE_S`. Without a run folder, the user's state folder is used."""
        self.start_writing(state_folder() / f"pid-{os.getpid()}")
        self._lines.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _write_lines(self, path: Path) -> None:
        descriptor = -1
        while (line := self._lines.get()) is not None:
            # The disk may be full, or the folder on another host: the aggregator still has the events.
            with contextlib.suppress(OSError):
                if descriptor < 0:
                    own_files.make_folder(path.parent)
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                    descriptor = os.open(path, flags, 0o600)
                os.write(descriptor, line.encode())
        if descriptor >= 0:
            os.close(descriptor)


class AgentEvents:
    """The events of an agent and its devices; the threads of samplers also add events."""

    def __init__(self, rank: int) -> None:
        self.log = LogFile(rank)
        self._limit = EventLimit()  # counts the events that it omits; a line with their number is due once a minute
        self._lock = threading.Lock()
        self._unsent: deque[Event] = deque()

    def report(self, kind: str, text: str) -> None:
        self.add_event(Event(time.time(), kind, text))

    def add_event(self, event: Event) -> None:
        """Add an event; if there are many equal events, most of them are only counted."""
        event = replace(event, text=event.text[:MAX_TEXT], count=min(event.count, MAX_EVENT_COUNT))
        with self._lock:
            self._add_due_omitted_counts(time.monotonic())
            if self._limit.admit(event):
                self._log_and_queue(event)

    def oldest_unsent(self) -> Event | None:
        """Return the oldest unsent event, which stays until `remove_oldest`; ``None`` if all are sent."""
        with self._lock:
            self._add_due_omitted_counts(time.monotonic())
            return self._unsent[0] if self._unsent else None

    def remove_oldest(self) -> None:
        with self._lock:
            self._unsent.popleft()

    def add_omitted_counts(self) -> None:
        """Add the lines that count omitted events, because the job ends; none of them displaces an event."""
        with self._lock:
            self._add_due_omitted_counts(math.inf, 2 * MAX_UNSENT)

    def _add_due_omitted_counts(self, now_s: float, max_unsent: int = MAX_UNSENT) -> None:
        for event in self._limit.take_left_out(now_s):
            self._log_and_queue(event, max_unsent)

    def _log_and_queue(self, event: Event, max_unsent: int = MAX_UNSENT) -> None:
        self.log.add_line(event)
        if len(self._unsent) >= max_unsent:
            self._limit.leave_out(self._unsent.popleft())
        self._unsent.append(event)


def write_notice(text: str) -> None:
    """Write one line to the job's stderr, unless `silence_stderr` was called."""
    with contextlib.suppress(OSError):
        os.write(2, f"[EfficientLLM] {text}\n".encode())


def silence_stderr() -> None:
    """Close the job's stderr: with an inherited open descriptor, `torchrun ... 2>&1 | tee` would not end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


class Notices:
    """Events of an agent about missing metrics; a notice in the terminal is written once per host."""

    def __init__(self, trainer: Trainer, events: AgentEvents) -> None:
        self._trainer, self._events = trainer, events
        self._started_s = time.monotonic()
        self.is_explained = False  # whether the reason of the missing aggregator was reported

    def report_no_metrics(self, text: str) -> None:
        """Report why there are no metrics; then a missing aggregator is not reported, too."""
        self.is_explained = self.is_explained or self._trainer.is_first_of_host
        self._report_once_per_host(text, text)

    def report_no_aggregator(self, now_s: float) -> None:
        """Report once that there was no aggregator for `NO_AGGREGATOR_AFTER_S`."""
        if self.is_explained or now_s - self._started_s < NO_AGGREGATOR_AFTER_S:
            return
        self.is_explained = True
        endpoint = self._trainer.facts.endpoint
        text = f"no aggregator answers at {endpoint}" if endpoint else "rank 0 has not published its address"
        self._report_once_per_host(text, f"{text}: no metrics without an aggregator; training goes on")

    def report_wait(self, limit_s: float) -> None:
        """Report that the agent waits for an aggregator that has not answered yet, although the trainer has ended."""
        text = f"no aggregator has answered yet: its reports are kept for up to {limit_s:.0f} s after the job's end"
        self._report_once_per_host(text, f"rank {self._trainer.rank}: {text}")

    def report_undelivered(self, num_reports: int) -> None:
        text = f"{num_reports} reports could not be delivered to {self._trainer.facts.endpoint or 'rank 0'}"
        self._report_once_per_host(text, "" if self.is_explained else f"rank {self._trainer.rank}: {text}")

    def _report_once_per_host(self, text: str, notice: str) -> None:
        """Record an event; the first rank of a host also writes a notice, if there is one, to the terminal."""
        self._events.report("agent", text)
        if notice and self._trainer.is_first_of_host:
            write_notice(notice)
