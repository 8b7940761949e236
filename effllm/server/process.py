"""The aggregator's process: sockets, files, threads and clocks; the rules are in effllm.job.

The process is started by rank 0's agent on a listening socket, or separately by ``effllm serve``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

import msgspec
import zmq

from effllm.config.settings import Config, secret_path, unknown_variables
from effllm.config.spawn import NO_RESOURCES, is_out_of_resources
from effllm.config.switches import process_environ
from effllm.job.aggregator import Aggregator
from effllm.job.device_states import device_states
from effllm.job.pacing import is_large, pause_s, save_every_s
from effllm.job.reporting import first_start_time_s
from effllm.network import secret
from effllm.network.curve import ServerKeys
from effllm.network.discovery import openness_warning
from effllm.network.listening import raise_open_files_limit
from effllm.network.peer_admission import PeerAdmission
from effllm.network.peers import Peers
from effllm.network.transport import ServerSocket, make_context
from effllm.records.clock import Now
from effllm.records.device_state import DeviceFeed
from effllm.records.job import Summary
from effllm.records.orders import Orders
from effllm.records.rank import Event
from effllm.records.wire import Hello
from effllm.server.folder import lock_folder, remove_state, restore_state
from effllm.server.job_end import JobEnd
from effllm.server.messages import Acknowledgement, Messages, Sequences
from effllm.server.outputs import Outputs, stop_writers
from effllm.server.run_facts import RunFacts, SlowFacts
from effllm.sinks import SINKS_WITH_DEVICES, RunInfo, no_such_sink, sink_names
from effllm.store.provenance import boot_id

Item = TypeVar("Item")

TICK_S = 0.5
FIRST_SUMMARY_S, SUMMARY_EVERY_S = 5.0, 60.0  # a new job is soon in `inspect` and `top`
KILLED_WITHIN_S = 90.0  # time from SIGTERM to a kill; the default of Slurm and Kubernetes is 30 s
SINKS_STOP_S, STORE_STOP_S = 1.5, 3.0
DISK_WAIT_S = 60.0  # wait for a stalled disk at the end, when no other process waits for the aggregator
FLOOD_PAUSE_S = 0.05  # pause in a flood of rejected frames: the queue of their peer fills, so the peer must wait
FACTS_EVERY_S = 1.0  # minimum period between two writes of run.json for new ranks

#: Status of a separate aggregator (``effllm serve``) that ended before any rank connected.
UNUSED = "unused"


class Inbox(Generic[Item]):
    """A queue for pollers: its descriptor is readable while the queue has items."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Add an item; any thread may call this."""
        self._items.put(item)
        os.eventfd_write(self.descriptor, 1)

    def take_items(self) -> Iterator[Item]:
        """Yield the items, oldest first, until the queue is empty."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._items.get_nowait()


class Server:
    """An aggregator with its socket, its store and its sinks."""

    def __init__(self, orders: Orders, stdout: TextIO) -> None:
        self._orders, self._config, self._stdout = orders, orders.config, stdout
        self._is_stopping = False
        self._may_be_killed_until_s = 0.0  # after a scheduler's warning
        self.address = ""  # set by `run`
        self._inbox: Inbox[Event | Sequences | SlowFacts] = Inbox()
        self._secret = secret.read(secret_path(self._config)) if orders.secured else b""
        self._peers = Peers(self._config.history_size)
        self._facts = RunFacts(orders)
        self._heard_until_s = time.monotonic()  # all messages up to this time have been received
        self._has_new_hellos = False  # since the last collection of garbage
        self.has_begun = False  #: whether a rank has joined
        self._was_stalled = False  # status in the last summary; a change is written at once, because the job may end

    def run(self) -> str:
        """Serve until the end of the job; return its status, or `UNUSED` if no rank joined.

        If no rank joined, a new run folder is removed.

        Raises:
            zmq.ZMQError: the endpoint cannot be bound.
            SecretError: the job must be secured, but no secret is usable.
        """
        raise_open_files_limit()
        context, orders = make_context(), self._orders
        keys = ServerKeys.from_secret(self._secret, orders.salt) if self._secret else None
        self._peer_admission = PeerAdmission(context, keys)
        self._socket = ServerSocket(context, keys)
        # A listening socket already has an address. Connections to this socket must wait until the run folder is open,
        # because they could use all descriptors.
        self.address = orders.endpoint if orders.listen_descriptor >= 0 else self._socket.listen(orders.endpoint)
        if not self._secret and (warning := openness_warning(self.address)):
            self._warn(warning, "security")
        folder_existed = Path(orders.folder).exists()
        read_secret = partial(secret.read, secret_path(self._config))
        with lock_folder(orders, self.address, context, lambda: self._secret or read_secret(), self._warn) as folder:
            self._start(folder)
            if orders.listen_descriptor >= 0:
                self.address = self._socket.listen(orders.endpoint, orders.listen_descriptor)
            self._peer_admission.monitor_socket(self._socket.socket)
            try:
                self._loop()
            finally:
                gc.unfreeze()
                gc.enable()
            status = self._finish()
        if status == UNUSED and folder is not None and not folder_existed:
            shutil.rmtree(folder, ignore_errors=True)
        rejected = self._messages.rejected_job
        self._end.wait_for_disconnections(lambda: bool(rejected) and self._messages.probe_peer(rejected))
        self._peer_admission.close()
        self._socket.close()
        context.destroy(linger=500)
        return status

    def stop(self, *_: object) -> None:
        """Stop the loop; afterwards open windows are closed and written."""
        self._is_stopping = True

    def warn_of_kill(self, *_: object) -> None:
        """Handle a scheduler's warning: all processes of the job may be killed soon."""
        self._may_be_killed_until_s = time.monotonic() + KILLED_WITHIN_S

    def _start(self, folder: Path | None) -> None:
        self._folder, orders, config = folder, self._orders, self._config
        state = restore_state(folder, orders.job, self._warn) if folder is not None else None
        attempt = state.attempt if state else 1
        self._aggregator = aggregator = Aggregator(config, orders.job, attempt, time.time(), state, boot_id())
        facts = self._facts.begin(folder)
        charts_folder = _event_file_folder(config, folder, facts)
        run = RunInfo(config, aggregator.ledger.attempt, folder, charts_folder, self._stdout, facts, self._warn)
        devices = DeviceFeed(not SINKS_WITH_DEVICES.isdisjoint(config.sink_options()))
        run = replace(
            run, identity=lambda: self._facts.identity, fact=lambda name: self._facts.values.get(name), devices=devices
        )
        self._outputs = Outputs(run, self._write_new_ranks, partial(device_states, aggregator))
        self._end = JobEnd(aggregator, orders, lambda rank: self._messages.probe(rank))
        self._messages = Messages(
            self._socket, self._peers, aggregator, str(folder or ""), self._end, self._on_hello, self._warn
        )
        self._acknowledgement = Acknowledgement(
            aggregator,
            config.history_size,
            self._outputs.write,
            partial(self._outputs.save_state, self._inbox.put) if self._outputs.store is not None else None,
            self._messages.acknowledge,
        )
        self._outputs.open_writers()
        unknown_sinks = [name for name in config.sink_options() if name not in sink_names()]
        if unknown_sinks and "console" not in config.sink_options():  # perhaps misspelt: then no line would be printed
            sys.stderr.write(f"[EfficientLLM] {no_such_sink(unknown_sinks[0])}\n")
            sys.stderr.flush()
        if warnings := unknown_variables(process_environ()):
            self._warn("; ".join(warnings), "warning")
        slow_facts = partial(self._facts.read_slow_facts, self._inbox.put)
        threading.Thread(target=slow_facts, name="slow facts", daemon=True).start()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket.socket, zmq.POLLIN)
        poller.register(self._inbox.descriptor, zmq.POLLIN)
        for socket in self._peer_admission.sockets:
            poller.register(socket, zmq.POLLIN)
        next_tick_s = next_summary_s = time.monotonic()
        summary_period_s = FIRST_SUMMARY_S
        # Messages contain no reference cycles, and with ten thousand ranks the search for cycles takes more time than
        # all other work.
        gc.disable()
        while not (self._is_stopping or self._messages.rejected_job or self._messages.is_superseded):
            poller.poll(int(max(next_tick_s - time.monotonic(), 0.0) * 1000) + 1)
            self._receive()
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                self._tick(Now(now_s, time.time()))
                if self._end.is_over(now_s):
                    return
                if self._aggregator.open_windows.has_more_to_close:  # a turn closes a limited number
                    next_tick_s = now_s
            if now_s >= next_summary_s or self._aggregator.stalls.is_job_stalled != self._was_stalled:
                next_summary_s = now_s + summary_period_s
                summary_period_s = min(2 * summary_period_s, SUMMARY_EVERY_S)
                self._collect_garbage()
                self._was_stalled = self._aggregator.stalls.is_job_stalled
                self._outputs.write_summary(self._summary(ended=False))
            self._write_results()
            if self._aggregator.is_finished(now_s):
                return

    def _receive(self) -> None:
        for line in self._peer_admission.admit_waiting_peers(time.monotonic()):
            self._aggregator.events.record(Event(time.time(), "rejected", line))
        if self._messages.receive():
            self._heard_until_s = time.monotonic()
            if seconds := max(pause_s(self._aggregator.ledger.world_size), FLOOD_PAUSE_S * self._messages.is_flooded):
                time.sleep(seconds)

    def _on_hello(self, message: Hello) -> None:
        self._has_new_hellos = True
        if self._facts.add_hello(message):  # all ranks have joined
            self._warn(self._facts.started_text(self._folder), "started")
            if is_large(message.world_size):  # now, so that no window has to wait for it
                self._collect_garbage()
        if not self.has_begun:  # the state shows this attempt, even if it is killed before its first window
            self.has_begun = True
            self._acknowledgement.save_state()

    def _collect_garbage(self) -> None:
        """Collect cycles, but search the objects of ten thousand HELLOs only once, because the search takes 0.25 s."""
        gc.collect()
        if self._has_new_hellos:
            self._has_new_hellos = False
            gc.freeze()

    def _tick(self, now: Now) -> None:
        """Record rejected peers and lost ranks, close windows, write changed facts, and the summary before a kill."""
        for event in self._peers.take_events():
            self._aggregator.events.record(event)
        self._aggregator.ledger.note_aggregator_costs(time.process_time(), self._socket.received_bytes)
        self._end.mark_disconnected_as_lost(now.mono_s)
        self._aggregator.tick(now, self._heard_until_s)
        # The facts of ten thousand ranks are 8 MB, so larger worlds write their facts less often.
        self._update_facts(max(save_every_s(self._aggregator.ledger.world_size), FACTS_EVERY_S))
        if now.mono_s < self._may_be_killed_until_s:  # this status is correct if a kill comes before the next tick
            self._outputs.write_summary(msgspec.structs.replace(self._summary(ended=False), status="killed"))

    def _update_facts(self, every_s: float = 0.0, is_over: bool = False) -> None:
        """Write changed facts to run.json, at most once in ``every_s`` seconds."""
        ledger = self._aggregator.ledger
        self._facts.add_times(first_start_time_s(ledger), ledger.goodput.end_time_s if is_over else None)
        facts = self._facts.take_facts(time.monotonic(), every_s, lambda: self._aggregator.roster.job.parameters)
        if facts is not None:
            self._outputs.put_to_store(lambda store: store.update_facts(facts))

    def _write_results(self) -> None:
        """Handle the items of other threads, then write and send what is due."""
        for item in self._inbox.take_items():
            if isinstance(item, Event):
                self._aggregator.events.record(item)
            elif isinstance(item, SlowFacts):
                self._facts.add_slow_facts(item)
            else:
                self._acknowledgement.acknowledge_saved(item)
        self._acknowledgement.write_windows_and_state(Now.read())
        if events := self._aggregator.events.take_events():
            self._outputs.write_events(events)
        self._messages.request_stacks()
        if files := self._aggregator.stalls.take_files():
            self._outputs.write_stacks(files)
        if recorded := self._aggregator.take_recordings():
            self._outputs.put_to_store(lambda store: store.write_recorded_stacks(recorded))

    def _write_new_ranks(self) -> None:
        """Write the facts before a window: its rows contain the hosts of ranks, which the run folder reads there."""
        self._update_facts(0.0 if self._facts.has_new_rank else FACTS_EVERY_S)

    def _warn(self, text: str, kind: str = "sink") -> None:
        """Record an event; any thread may call this."""
        self._inbox.put(Event(time.time(), kind, text))

    def _summary(self, ended: bool) -> Summary:
        self._aggregator.ledger.note_aggregator_costs(time.process_time(), self._socket.received_bytes)
        summary = self._aggregator.summary(time.time(), ended)
        is_refused = ended and self._messages.lacks_descriptors and not self._aggregator.ledger.world_size
        return msgspec.structs.replace(
            self._facts.with_identity(summary),
            events={**summary.events, **self._peers.rejected, **self._peer_admission.counts},
            left_out=self._outputs.left_out(ended),
            status="refused" if is_refused else summary.status,
        )

    def _finish(self) -> str:
        self._aggregator.close_all()
        self._tick(Now.read())
        self._write_results()
        self._facts.stop_git()
        was_used = self._aggregator.ledger.world_size or self._messages.lacks_descriptors
        if not was_used and self._orders.trainer_descriptor < 0:
            stop_writers(self._outputs.writers(), STORE_STOP_S)
            return UNUSED
        self._update_facts()
        deadline_s = time.monotonic() + STORE_STOP_S
        # The store is stopped last, because its summary counts the windows that the sinks have not written.
        self._outputs.stop_sinks(self._summary(ended=True), SINKS_STOP_S)
        self._write_results()
        self._update_facts(is_over=True)
        summary = self._summary(ended=True)
        # The state includes the BYEs, from which the next attempt computes the status of this attempt.
        self._outputs.stop_store(self._aggregator.snapshot(), summary)
        if not self._outputs.join_store(deadline_s - time.monotonic()):
            _release_output(self._orders)
            self._outputs.join_store(DISK_WAIT_S)
        self._write_results()
        if summary.status == "completed" and self._folder is not None:
            remove_state(self._folder)
        return summary.status


def _release_output(orders: Orders) -> None:
    """Close the job's output before a wait for a stalled disk, because readers of the output would also wait."""
    if orders.trainer_descriptor >= 0:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for descriptor in (orders.stdout_descriptor, 2):
            os.dup2(null, descriptor)
        os.close(null)


def _event_file_folder(config: Config, folder: Path | None, facts: Mapping[str, Any]) -> Path | None:
    """Return the folder of TensorBoard's event file; ``None`` without the sink.

    This is a folder of the run in the configured folder, or a folder below the framework's folder, or the run folder:
    TensorBoard names a run by its folder.  TensorBoard drops points if two event files in one folder are written at the
    same time, so effllm's file has a separate folder.  The framework's folder may be on another host, because the
    framework may write from another rank.
    """
    options = config.sink_options().get("tensorboard")
    if options is None:
        return None
    if options.get("dir"):
        return Path(options["dir"]) / (folder.name if folder else "efficientllm")
    framework_folder = str(facts.get("tensorboard_dir") or "")
    if framework_folder and os.path.isdir(framework_folder) and os.access(framework_folder, os.W_OK):  # noqa: PTH112
        return Path(framework_folder) / "efficientllm"
    return folder


def main(arguments: list[str]) -> int:
    """Run an aggregator with the `Orders` on the descriptor ``arguments[0]``, as JSON."""
    # The aggregator ends after the BYEs of its job: a scheduler's SIGTERM also reaches trainers, which may still save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SIGTERM is ignored until the server handles this signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(arguments[0])
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as file:
        orders = msgspec.json.decode(file.read(), type=Orders)
    stdout = os.fdopen(orders.stdout_descriptor, "w", encoding="utf-8", errors="replace", closefd=False)
    server = Server(orders, stdout)
    signal.signal(signal.SIGTERM, server.warn_of_kill)
    try:
        server.run()
    except Exception as error:
        if is_out_of_resources(error) and not server.has_begun:
            os._exit(NO_RESOURCES)  # at once, because a thread that has started cannot be joined; the agent logs it
        raise
    # The thread of a stalled sink cannot be joined.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
