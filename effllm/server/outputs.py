"""The outputs of the aggregator: the store and the sinks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from effllm.job.closed_windows import Closed
from effllm.job.health.stalls import StackFile
from effllm.records.host_lines import RecordedStacks
from effllm.records.job import Summary
from effllm.records.rank import Event
from effllm.server.writer import Writer
from effllm.sinks import RunInfo, Sink, open_sink
from effllm.store import run_folder
from effllm.store.ledger_file import FIRST_LINE_S, LINE_AFTER_S, LedgerFile, ledger_line
from effllm.store.run_folder import RunFolder, open_run_folder

STORE_OPENS_S = 2.0


class Outputs:
    """The store, if there is a run folder, and the sinks, each in its own thread.

    Args:
        run: the run; its ``log`` receives warnings.
    """

    def __init__(self, run: RunInfo) -> None:
        self._last_summary: Summary | None = None  # set when the job has ended
        run = dataclasses.replace(run, summary=lambda: self._last_summary)
        self._sinks = {
            name: Writer(f"sink {name}", partial(open_sink, name, run), run.log) for name in run.config.sink_options()
        }
        self._store: Writer[RunFolder] | None = None
        if run.folder is not None:
            open_store = partial(
                open_run_folder,
                run.folder,
                run.facts,
                warn=run.log,
                tensorboard_dir=run.tensorboard_dir,
                limit_mb=run.config.run_folder_mb,
                log_interval=run.config.log_interval,
            )
            self._store = Writer("run folder", open_store, run.log)
        self._ledger: Writer[LedgerFile] | None = None
        self._next_line_s = FIRST_LINE_S  # elapsed time of the job at its next line
        if run.config.ledger:
            self._ledger = Writer("ledger", partial(LedgerFile, Path(run.config.ledger)), run.log)
        self._folder = run.folder

    def start(self) -> None:
        """Open the sinks and the store; wait at most `STORE_OPENS_S` for the store."""
        for writer in self._writers():
            writer.start()
        if self._store is not None:
            self._store.opened.wait(STORE_OPENS_S)

    @property
    def has_store(self) -> bool:
        return self._store is not None

    def write(self, closed: Sequence[Closed]) -> None:
        """Write windows as one item: an agent that reconnects may send a thousand reports, which would fill a queue."""
        # The writers do not refer to all reports of ten thousand ranks: memory that is freed at once is used again.
        kept_of = [(one.report, one.kept) for one in closed]

        def store_all(store: RunFolder) -> None:
            for report, kept in kept_of:
                store.write(report, kept)

        def write_all(sink: Sink) -> None:
            for report, _ in kept_of:
                sink.write(report)

        self._to_store(store_all, len(closed))
        self._to_sinks(write_all, len(closed))

    def write_events(self, events: Sequence[Event]) -> None:
        """Write events as one item: events of ten thousand ranks that join at once would fill a queue."""
        self._to_store(lambda store: store.write_events(events))
        self._to_sinks(lambda sink: _send_events(sink, events))

    def update_facts(self, facts: dict[str, Any]) -> None:
        self._to_store(lambda store: store.update_facts(facts))

    def write_summary(self, summary: Summary) -> None:
        self._to_store(lambda store: store.write_summary(summary))
        if self._ledger is not None and summary.elapsed_s >= self._next_line_s:
            # A killed job leaves at least half of its time in the ledger, or all of it but an hour.
            self._next_line_s = min(2 * summary.elapsed_s, summary.elapsed_s + LINE_AFTER_S)
            line = ledger_line(summary, self._folder)
            self._ledger.put(lambda ledger: ledger.append(line))

    def write_stacks(self, files: Sequence[StackFile]) -> None:

        def write(store: RunFolder) -> None:
            for file in files:
                store.write_file(f"stacks/{file.name}", file.text)

        self._to_store(write)

    def write_recorded(self, recorded: Sequence[RecordedStacks]) -> None:
        self._to_store(lambda store: store.write_recorded(recorded))

    def save_state(self, state: bytes, on_saved: Callable[[], None]) -> None:
        """Write a state after all earlier items, then call `on_saved` in the store's thread."""

        def save(store: RunFolder) -> None:
            if store.save_state(state):  # without a written state, reports are not acknowledged
                on_saved()

        self._to_store(save)

    def left_out(self, is_over: bool) -> dict[str, int]:
        """Return the number of unwritten windows by sink; the store writes its windows before the summary."""
        counts = {name: sink.left_out + (sink.unfinished if is_over else 0) for name, sink in self._sinks.items()}
        counts[run_folder.NAME] = self._store.left_out if self._store is not None else 0
        return {name: count for name, count in counts.items() if count}

    def stop_sinks(self, summary: Summary, timeout_s: float) -> None:
        """Stop the sinks and the ledger in parallel, so that a stalled output does not delay other outputs."""
        self._last_summary = summary
        if self._ledger is not None:
            line = ledger_line(summary, self._folder)
            self._ledger.stop(lambda ledger: ledger.append(line))
        _stop(list(self._sinks.values()), timeout_s, [self._ledger] if self._ledger is not None else [])

    def stop_store(self, state: bytes, summary: Summary) -> None:
        """Write the last state and summary, and stop the store; `join_store` waits for it."""

        def last(store: RunFolder) -> None:
            store.save_state(state)
            store.write_summary(summary)

        if self._store is not None:
            self._store.stop(last)

    def join_store(self, timeout_s: float) -> bool:
        """Wait for the store; return whether it has ended."""
        return self._store is None or self._store.join(timeout_s)

    def discard(self, timeout_s: float) -> None:
        """Stop without a summary, because no rank has joined."""
        _stop(self._writers(), timeout_s)

    def _writers(self) -> list[Writer[Any]]:
        return [*self._sinks.values(), *(one for one in (self._store, self._ledger) if one is not None)]

    def _to_sinks(self, work: Callable[[Sink], None], windows: int = 0) -> None:
        for sink in self._sinks.values():
            sink.put(work, windows)

    def _to_store(self, work: Callable[[RunFolder], None], windows: int = 0) -> None:
        if self._store is not None:
            self._store.put(work, windows)


def _stop(writers: Sequence[Writer[Any]], timeout_s: float, stopped: Sequence[Writer[Any]] = ()) -> None:
    """Stop writers and wait for them, and for the writers that were stopped before."""
    deadline_s = time.monotonic() + timeout_s
    for writer in writers:
        writer.stop()
    for writer in (*writers, *stopped):
        writer.join(deadline_s - time.monotonic())


def _send_events(sink: Sink, events: Sequence[Event]) -> None:
    if (write := getattr(sink, "event", None)) is not None:
        for event in events:
            write(event)
