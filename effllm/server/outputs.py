"""The outputs of the aggregator: the store and the sinks, each in its own thread, so that a stall blocks no other."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from effllm.job.closed_windows import Closed
from effllm.job.health.stalls import StackFile
from effllm.records.device_state import DeviceState
from effllm.records.job import Summary
from effllm.records.rank import Event, RankReport
from effllm.sinks import RunInfo, Sink, SinkUnavailable, WriteFailed, open_sink
from effllm.store import run_folder
from effllm.store.ledger_file import FIRST_LINE_S, LINE_AFTER_S, LedgerFile, ledger_line
from effllm.store.run_folder import RunFolder, StoreUnavailable, open_run_folder

Item = TypeVar("Item")

STORE_OPENS_S = 2.0
MAX_WARNINGS = 10  # different texts of one writer
MAX_QUEUED = 256  # items of one writer


class Outputs:
    """The store, if there is a run folder, and the sinks, each in its own thread; ``prepare`` precedes each `write`.

    ``device_states`` returns the newest states of the devices from the reports of the newest window.
    """

    def __init__(
        self,
        run: RunInfo,
        prepare: Callable[[], None],
        device_states: Callable[[Sequence[RankReport]], tuple[DeviceState, ...]],
    ) -> None:
        self._prepare, self._device_states, self._device_feed = prepare, device_states, run.devices
        self._last_summary: Summary | None = None  # set when the job has ended
        run = dataclasses.replace(run, summary=lambda: self._last_summary)
        self._sinks = {
            name: Writer(f"sink {name}", partial(open_sink, name, run), run.log) for name in run.config.sink_options()
        }
        self.store: Writer[RunFolder] | None = None
        if run.folder is not None:
            open_store = partial(
                open_run_folder,
                run.folder,
                run.facts,
                warn=run.log,
                tensorboard_dir=run.tensorboard_dir,
                limit_mb=run.config.run_folder_mb,
            )
            self.store = Writer("run folder", open_store, run.log)
        self._ledger: Writer[LedgerFile] | None = None
        self._next_line_s = FIRST_LINE_S  # elapsed time of the job at its next line
        if run.config.ledger:
            self._ledger = Writer("ledger", partial(LedgerFile, Path(run.config.ledger)), run.log)
        self._folder = run.folder

    def open_writers(self) -> None:
        """Open all outputs in their threads; wait at most `STORE_OPENS_S` for the store."""
        for writer in self.writers():
            writer.start()
        if self.store is not None:
            self.store.opened.wait(STORE_OPENS_S)

    def write(self, closed: Sequence[Closed]) -> None:
        """Write windows as one item: an agent that reconnects may send a thousand reports, which would fill a queue."""
        self._prepare()
        if self._device_feed.is_wanted:
            self._device_feed.newest = self._device_states(closed[-1].rows)
        # The writers do not refer to all reports of ten thousand ranks: memory that is freed at once is used again.
        reports_and_kept = [(window.report, window.kept) for window in closed]  # kept: reports of ranks

        def store_all(store: RunFolder) -> None:
            for report, kept in reports_and_kept:
                store.write(report, kept)

        def write_all(sink: Sink) -> None:
            for report, _ in reports_and_kept:
                sink.write(report)

        self.put_to_store(store_all, len(closed))
        self._put_to_sinks(write_all, len(closed))

    def write_events(self, events: Sequence[Event]) -> None:
        """Write events as one item: events of ten thousand ranks that join at once would fill a queue."""
        self.put_to_store(lambda store: store.write_events(events))
        self._put_to_sinks(lambda sink: _send_events(sink, events))

    def write_summary(self, summary: Summary) -> None:
        self.put_to_store(lambda store: store.write_summary(summary))
        if self._ledger is not None and summary.elapsed_s >= self._next_line_s:
            # A killed job leaves at least half of its time in the ledger, or all of it but an hour.
            self._next_line_s = min(2 * summary.elapsed_s, summary.elapsed_s + LINE_AFTER_S)
            line = ledger_line(summary, self._folder)
            self._ledger.put(lambda ledger: ledger.append(line))

    def write_stacks(self, files: Sequence[StackFile]) -> None:
        def write(store: RunFolder) -> None:
            for file in files:
                store.write_file(f"stacks/{file.name}", file.text)

        self.put_to_store(write)

    def save_state(self, on_saved: Callable[[Item], None], state: bytes, item: Item) -> None:
        """Write a state after all earlier items, then call ``on_saved`` with an item in the store's thread."""

        def save(store: RunFolder) -> None:
            if store.save_state(state):  # without a written state, reports are not acknowledged
                on_saved(item)

        self.put_to_store(save)

    def left_out(self, is_over: bool) -> dict[str, int]:
        """Return the number of unwritten windows by sink; windows that wait for the store precede the summary there."""
        counts = {name: sink.left_out + (sink.unfinished if is_over else 0) for name, sink in self._sinks.items()}
        counts[run_folder.SINK_NAME] = self.store.left_out if self.store is not None else 0
        return {name: count for name, count in counts.items() if count}

    def stop_sinks(self, summary: Summary, timeout_s: float) -> None:
        """Stop the sinks and the ledger in parallel, so that a stalled output does not delay other outputs."""
        self._last_summary = summary
        if self._ledger is not None:
            line = ledger_line(summary, self._folder)
            self._ledger.stop(lambda ledger: ledger.append(line))
        stop_writers(list(self._sinks.values()), timeout_s, [self._ledger] if self._ledger is not None else [])

    def stop_store(self, state: bytes, summary: Summary) -> None:
        """Write the last state and summary, and stop the store; `join_store` waits for it."""

        def write_last(store: RunFolder) -> None:
            store.save_state(state)
            store.write_summary(summary)

        if self.store is not None:
            self.store.stop(write_last)

    def join_store(self, timeout_s: float) -> bool:
        """Wait for the store; return whether it has ended."""
        return self.store is None or self.store.join(timeout_s)

    def writers(self) -> list[Writer[Any]]:
        return [*self._sinks.values(), *(writer for writer in (self.store, self._ledger) if writer is not None)]

    def _put_to_sinks(self, work: Callable[[Sink], None], num_windows: int = 0) -> None:
        for sink in self._sinks.values():
            sink.put(work, num_windows)

    def put_to_store(self, work: Callable[[RunFolder], None], num_windows: int = 0) -> None:
        if self.store is not None:
            self.store.put(work, num_windows)


def stop_writers(writers: Sequence[Writer[Any]], timeout_s: float, already_stopped: Sequence[Writer[Any]] = ()) -> None:
    """Stop writers and wait for them, and for the writers that were stopped before."""
    deadline_s = time.monotonic() + timeout_s
    for writer in writers:
        writer.stop()
    for writer in (*writers, *already_stopped):
        writer.join(deadline_s - time.monotonic())


def _send_events(sink: Sink, events: Sequence[Event]) -> None:
    if (write := getattr(sink, "event", None)) is not None:
        for event in events:
            write(event)


class Closeable(Protocol):
    """The target of a writer."""

    def close(self) -> None: ...


Target = TypeVar("Target", bound=Closeable)


class Writer(Generic[Target]):
    """Writes to a sink or to the store in its own thread, which opens it, with a bounded queue.

    ``warn`` receives warnings, each text once; it is called from the thread of the writer or of the caller.
    """

    def __init__(
        self, name: str, open_target: Callable[[], Target], warn: Callable[[str], None], max_queued: int = MAX_QUEUED
    ) -> None:
        self._name, self._open_target, self._warn = name, open_target, warn
        self._queue: queue.Queue[tuple[int, Callable[[Target], None]] | None] = queue.Queue(max_queued)  # None: end
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.opened = threading.Event()  # also set if opening has failed
        self._warned_texts: set[str] = set()
        self._num_dropped = self._num_failed = self._num_at_work = 0  # numbers of windows

    def start(self) -> None:
        """Start the thread, which first opens the target."""
        self._thread.start()

    def put(self, work: Callable[[Target], None], num_windows: int = 0) -> None:
        """Queue work that writes this number of windows; if the queue is full, drop the work and count its windows."""
        try:
            self._queue.put_nowait((num_windows, work))
        except queue.Full:
            self._num_dropped += num_windows
            self._warn_once(f"{self._name} is too slow: reports are dropped")

    def stop(self, last_work: Callable[[Target], None] = lambda _: None) -> None:
        """Queue the last work and the end; if the queue is full, drop its oldest work."""
        for item in ((0, last_work), None):
            while True:
                try:
                    self._queue.put_nowait(item)
                    break
                except queue.Full:
                    with contextlib.suppress(queue.Empty):
                        self._num_dropped += self._num_windows(self._queue.get_nowait())

    def join(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for the end of the thread after `stop`; return whether it has ended."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    @property
    def left_out(self) -> int:
        """Number of windows that were dropped or could not be written."""
        return self._num_dropped + self._num_failed

    @property
    def unfinished(self) -> int:
        """Number of windows that are queued or being written."""
        return self._num_at_work + sum(map(self._num_windows, list(self._queue.queue)))

    @staticmethod
    def _num_windows(item: tuple[int, Callable[[Target], None]] | None) -> int:
        return item[0] if item else 0

    def _loop(self) -> None:
        target = self._try_open()
        self.opened.set()
        while (item := self._queue.get()) is not None:
            if target is not None:
                self._num_at_work, work = item
                if not self._try_work(target, work):
                    self._num_failed += self._num_at_work
                self._num_at_work = 0
        if target is not None:
            self._try_work(target, lambda opened: opened.close())

    def _try_open(self) -> Target | None:
        try:
            return self._open_target()
        except (SinkUnavailable, StoreUnavailable) as error:
            self._warn_once(f"{self._name} is off: {error}")
        except Exception as error:  # noqa: BLE001 - as in _try_work
            self._warn_once(f"{self._name} failed to open: {type(error).__name__}: {error}")
        return None

    def _try_work(self, target: Target, work: Callable[[Target], None]) -> bool:
        """Do the work; return whether it succeeded; count earlier windows that are lost with it."""
        try:
            work(target)
        except Exception as error:  # noqa: BLE001 - a sink is a plug-in: its errors must not end the thread
            self._num_failed += error.lost if isinstance(error, WriteFailed) else 0
            self._warn_once(f"{self._name} failed: {type(error).__name__}: {error}")
            return False
        return True

    def _warn_once(self, text: str) -> None:
        if text not in self._warned_texts and len(self._warned_texts) < MAX_WARNINGS:
            self._warned_texts.add(text)
            self._warn(text)
