"""The aggregator's process: edges only.  Sockets, files, threads and clocks are here; rules are not.

Started by rank 0's agent on a socket that already listens, or on its own by ``effllm serve``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import queue
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec
import zmq

from effllm.aggregation.aggregator import Aggregator, Closed
from effllm.aggregation.ledger import Ledger, restore
from effllm.aggregation.orders import Orders
from effllm.aggregation.pacing import is_large, keep_every_s, pause_s, quiet_s, report_every_s
from effllm.aggregation.roster import SILENT_AFTER_S
from effllm.config import Config, secret_path
from effllm.health.lost_agents import LostAgents
from effllm.network import secret
from effllm.network.curve import AgentKeys, ServerKeys
from effllm.network.descriptors import needed, raise_limit
from effllm.network.discovery import openness
from effllm.network.door import Door
from effllm.network.interface import is_loopback
from effllm.network.peers import Peers
from effllm.network.transport import FrameError, Link, ServerSocket, decode_from_agent, encode, is_hello, make_context
from effllm.runs import own_files, run_lock
from effllm.runs.provenance import Git, boot_id, gather
from effllm.schema import (
    Ack,
    AgentEvent,
    Beat,
    Bye,
    ByeSeen,
    Clock,
    Event,
    FromAgent,
    Hello,
    Inspect,
    Refused,
    Reports,
    Stack,
    Summary,
    Supersede,
    Welcome,
)
from effllm.server.acknowledgement import Acknowledgement, Sequences
from effllm.server.writer import Writer
from effllm.sinks import Run, Sink, open_sink
from effllm.store import run_folder
from effllm.store.run_folder import RunFolder, open_run_folder

TICK_S = 0.5
SUMMARY_EVERY_S = 60.0
KILLED_WITHIN_S = 90.0  # of SIGTERM: Slurm and Kubernetes give 30 s if nothing else is asked for
STORE_OPENS_S = 2.0
SINKS_STOP_S = 3.0
DISK_WAIT_S = 60.0  # for a disk that stands still at the end: nobody waits for us then
STATE = "state.json"
MOST_FRAMES = 1000  # between two looks at everything else ...
MAX_RECEIVE_S = 0.1  # ... nor for longer: on a busy machine frames may come as fast as they are taken
MAX_REJECTED = 32  # frames one after the other, more than there are peers: then nothing else waits
FLOOD_PAUSE_S = 0.05  # of the intake, while frames are rejected: their peer's queue fills, and it has to wait
MOST_FACTS = 1000  # of a run; rank 0 tells of some twenty
MAX_FACTS_BYTES = 256 * 1024  # of what ranks send as facts of the run
FACTS_EVERY_S = 1.0  # run.json is written again because of ranks that are known, at the most


class _Facts(NamedTuple):
    """Facts of the run that became known after its start."""

    facts: Mapping[str, Any]


#: Status of an aggregator of its own (``effllm serve``) that ended before any rank connected.
UNUSED = "unused"


class Server:
    """One aggregator with its socket and its sinks."""

    def __init__(self, orders: Orders, stdout: TextIO) -> None:
        self._orders = orders
        self._config = Config.from_dict(orders.config)
        self._stdout = stdout
        self._stop_asked = False
        self._warned_until_s = 0.0
        self.address = ""  # known once `run` has bound it
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbox: queue.SimpleQueue[Event | Sequences | _Facts] = queue.SimpleQueue()  # from other threads
        self._secret = secret.read(secret_path(self._config)) if orders.secured else b""
        self._peers = Peers(self._config.history_size)
        self._sinks: dict[str, Writer[Sink]] = {}
        self._store: Writer[RunFolder] | None = None
        self._last_summary: Summary | None = None  # once the job has ended
        self._heard_until_s = time.monotonic()
        self._told_facts_s = float("-inf")
        self._is_flooded = False  # frames were rejected when the socket was last emptied
        self._has_room_for = 0  # ranks, by the limit of open files
        self._told_shortage = False
        self._git = Git(Path.cwd())
        self._facts = {**gather(), **orders.facts, "config": orders.config, "job": orders.job}
        self._facts_changed = self._has_learned = self._has_begun = self._has_git_facts = self._has_new_rank = False
        self._facts_bytes = 0  # of those that ranks have sent
        self._lost = LostAgents()
        self._was_stalled = False  # as the last summary has it: there may be no later one
        self._predecessor: Link | None = None
        self._trainer_ended_s: float | None = None
        self._agent = os.getppid() if orders.by_agent else -1

    def run(self) -> str:
        """Serve until the job is over; return its status, or `UNUSED` if no rank has come: then no new folder is left.

        Raises:
            zmq.ZMQError: the endpoint cannot be bound.
            SecretError: there is no usable secret, and the job is to be secured.
        """
        raise_limit()
        self._context = context = make_context()
        orders, known = self._orders, self._secret
        keys = ServerKeys.of(known, orders.salt) if known else None
        self._door = Door(context, keys)
        self._socket = ServerSocket(context, keys)
        # A socket that listens already has its address, and who comes waits in its queue until the run folder is open:
        # those who come may take all descriptors that there are.
        self.address = orders.endpoint if orders.listen_descriptor >= 0 else self._socket.listen(orders.endpoint)
        if not known and (line := openness(self.address)):
            self._warn(line, "security")
        was_there = Path(orders.folder).exists()
        with self._run_folder() as folder:
            self._start(folder)
            if orders.listen_descriptor >= 0:
                self.address = self._socket.listen(orders.endpoint, orders.listen_descriptor)
            self._door.watch(self._socket.socket)
            try:
                self._loop()
            finally:
                gc.unfreeze()
                gc.enable()
            status = self._finish()
        if status == UNUSED and folder is not None and not was_there:
            shutil.rmtree(folder, ignore_errors=True)
        self._door.close()
        self._socket.close()
        context.destroy(linger=500)
        return status

    def stop(self, *_: object) -> None:
        """Ask for the end: what has come in is closed and written."""
        self._stop_asked = True

    def warn_of_kill(self, *_: object) -> None:
        """Take a scheduler's warning: all may be killed soon, we among them."""
        self._warned_until_s = time.monotonic() + KILLED_WITHIN_S

    # --- start ---

    @contextlib.contextmanager
    def _run_folder(self) -> Iterator[Path | None]:
        """Hold the run folder's lock; yield ``None`` where there is no folder to write to."""
        if not self._orders.folder:
            yield None
            return
        orders, host = self._orders, platform.node()
        own = run_lock.Holder(orders.run, orders.job, self.address, host, os.getpid(), orders.secured, orders.salt)
        try:
            lock = run_lock.take(Path(orders.folder), own, self._ask_to_end)
        except OSError as error:
            reason = error.strerror or str(error)
            self._warn(f"no run folder: {orders.folder} cannot be written ({reason}); set EFFICIENTLLM_RUN_DIR")
            yield None
            return
        finally:
            if self._predecessor is not None:
                self._predecessor.close()
        if lock.instead_of is not None:
            self._warn(
                f"another run is writing to {lock.instead_of}: this one goes to {lock.folder}; "
                "set EFFICIENTLLM_RUN_NAME to choose"
            )
        is_over = False
        try:
            yield lock.folder
            is_over = True
        finally:
            lock.release(is_over)

    def _ask_to_end(self, holder: run_lock.Holder) -> None:
        """Ask the aggregator of an earlier attempt, which waits for ranks that are gone, to let go of the folder."""
        address = holder.endpoint.removeprefix("tcp://").rpartition(":")[0]
        if holder.host != platform.node() and is_loopback(address):
            return  # at that address of this host is somebody else, or nobody
        if self._predecessor is None:
            keys = None
            if holder.secured:
                try:
                    keys = AgentKeys.of(self._secret or secret.read(secret_path(self._config)), holder.salt)
                except secret.SecretError:
                    return  # whoever has no secret asks for nothing
            self._predecessor = Link(self._context, holder.endpoint, keys)
            self._predecessor.connect()
        self._predecessor.send(Supersede(self._orders.run, self._orders.job))

    def _make_room(self, message: Supersede) -> None:
        """End for the next attempt of our job, if our own trainer is gone: who is alive is ended by nobody."""
        orders = self._orders
        is_ours = bool(orders.run) and message.run == orders.run and message.job != orders.job
        if is_ours and (orders.trainer_descriptor < 0 or _has_ended(orders.trainer_descriptor)):
            self._stop_asked = True

    def _start(self, folder: Path | None) -> None:
        self._folder = folder
        snapshot = self._restore()
        self._aggregator = Aggregator(
            self._config, self._orders.job, snapshot.attempt if snapshot else 1, time.time(), snapshot, boot_id()
        )
        self._acknowledgement = Acknowledgement(
            self._aggregator,
            self._config.history_size,
            self._put,
            self._save_state if folder is not None else None,
            self._send_acks,
        )
        charts = _event_files(self._config, folder, self._facts)
        self._open_sinks(folder, charts)
        if folder is not None:
            self._open_store(folder, charts)
        threading.Thread(target=self._ask_git, name="git", daemon=True).start()

    def _open_sinks(self, folder: Path | None, charts: Path | None) -> None:
        run = Run(
            self._config,
            self._aggregator.attempt,
            folder,
            charts,
            self._stdout,
            self._facts,
            self._warn,
            lambda: self._last_summary,
        )
        for name in self._config.sinks:
            sink = Writer[Sink](f"sink {name}", partial(open_sink, name, run), self._warn)
            sink.start()
            self._sinks[name] = sink

    def _open_store(self, folder: Path, charts: Path | None) -> None:
        options = {
            "warn": self._warn,
            "tensorboard_dir": charts,
            "limit_mb": self._config.run_folder_mb,
            "log_interval": self._config.log_interval,
        }
        self._store = Writer("run folder", partial(open_run_folder, folder, self._facts, **options), self._warn)
        self._store.start()
        self._store.opened.wait(STORE_OPENS_S)

    def _ask_git(self) -> None:
        """Add the commit of the user's code to the facts, in a thread of its own: git may take seconds."""
        self._inbox.put(_Facts(self._git.facts()))
        os.eventfd_write(self._wake, 1)

    def _restore(self) -> Ledger | None:
        if self._folder is None:
            return None
        try:
            snapshot = restore(own_files.read_file(self._folder / STATE))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._warn(f"{self._folder / STATE} cannot be read, the totals start anew: {error}")
            return None
        if snapshot.job == self._orders.job or not self._orders.job:
            return snapshot
        before = f"attempt {snapshot.attempt}, which was {snapshot.status()} at iteration {snapshot.iteration_shown}"
        self._warn(f"attempt {snapshot.attempt + 1} goes on in {self._folder} after {before}", "restarted")
        return snapshot.next_attempt(self._orders.job)

    # --- the loop ---

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        next_tick_s = next_summary_s = time.monotonic()
        # Messages hold no cycles, and among those of ten thousand ranks the search for some costs more than all else.
        gc.disable()
        while not self._stop_asked:
            self._door.wait_with(poller)
            poller.poll(int(max(next_tick_s - time.monotonic(), 0.0) * 1000) + 1)
            for line in self._door.look(time.monotonic()):
                self._aggregator.record(Event(time.time(), "refused", line))
            if self._receive():
                self._heard_until_s = time.monotonic()
                if seconds := max(pause_s(self._aggregator.world_size), FLOOD_PAUSE_S * self._is_flooded):
                    time.sleep(seconds)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                self._tick(now_s)
                if now_s < self._warned_until_s:
                    self._keep_as_killed()
                if self._over(now_s):
                    return
                if self._aggregator.is_closing:
                    next_tick_s = now_s
            if now_s >= next_summary_s or self._aggregator.is_stalled != self._was_stalled:
                next_summary_s = now_s + SUMMARY_EVERY_S
                self._collect()
                self._was_stalled = self._aggregator.is_stalled
                summary = self._summary(ended=False)
                self._to_store(lambda store, summary=summary: store.write_summary(summary))  # type: ignore[misc]
            self._hand_out(now_s)
            if self._aggregator.finished(now_s):
                return

    def _collect(self) -> None:
        """Look for cycles, but among what ten thousand introductions left no more than once: a quarter of a second."""
        gc.collect()
        if self._has_learned:
            self._has_learned = False
            gc.freeze()

    def _receive(self) -> bool:
        """Take what has arrived, in bounds; return whether that was all but frames of peers that send too much."""
        receive, admits, most_rejected = self._socket.receive, self._peers.admits, MAX_REJECTED + len(self._peers)
        in_a_row, until_s, now_s = 0, time.monotonic() + MAX_RECEIVE_S, 0.0
        for _ in range(MOST_FRAMES):
            # Peers are received from in turn: after so many rejected frames in a row, no other peer has one waiting.
            if in_a_row > most_rejected or (received := receive()) is None:
                self._is_flooded = in_a_row > 0
                return True
            peer, frame = received
            now_s = time.monotonic()
            if not admits(peer, len(frame), now_s, is_hello(frame)):  # not even decoded
                in_a_row += 1
                self._ask_again(peer, now_s)
                continue
            in_a_row = 0
            try:
                self._take(peer, decode_from_agent(frame), now_s, len(frame))
            except FrameError as error:
                self._aggregator.reject(time.time(), self._peers.garbage(peer, str(error)))
            if now_s > until_s:
                break
        return False

    def _ask_again(self, peer: bytes, now_s: float) -> None:
        """Have a peer whose frames were dropped begin anew with a HELLO, once it has room again."""
        if self._peers.is_to_send_again(peer, now_s):
            self._socket.send(peer, Welcome(self._aggregator.attempt, str(self._folder or ""), again=True))

    def _take(self, peer: bytes, message: FromAgent, now_s: float, num_bytes: int) -> None:
        time_s, aggregator = time.time(), self._aggregator
        reason = self._peers.objection(peer, message)
        if isinstance(message, Reports) and not reason:  # ten thousand a second, before all else
            if not aggregator.reports(message, now_s, time_s, num_bytes):
                self._peers.hold(peer)  # it sends again what was not taken
            return
        if isinstance(message, Supersede):
            self._make_room(message)
        elif isinstance(message, Hello):
            is_over = _has_ended(self._orders.trainer_descriptor)
            if not reason and is_over and aggregator.is_too_late(message):
                reason = "this attempt is over"
            if not reason and (trouble := self._shortage(message, now_s)):
                self._peers.turn_away()
                self._socket.send(peer, Refused(trouble, whole_job=True))
                # A job of one rank has no other agents; those of a larger job would search on for an aggregator.
                self._stop_asked = self._stop_asked or message.world_size == 1
                return
            reason = reason or aggregator.hello(message, now_s, time_s)
            if reason:
                self._peers.turn_away()
                self._socket.send(peer, Refused(reason, again=is_over))
                return
            self._peers.introduce(peer, message, now_s)
            self._learn(message)
            if not self._has_begun:  # the next start is to know of this one, even if all is killed before a window
                self._has_begun = True
                self._acknowledgement.save_state()
            every_s = report_every_s(message.world_size)
            self._socket.send(peer, Welcome(aggregator.attempt, str(self._folder or ""), report_every_s=every_s))
        elif reason:
            self._ask_again(peer, now_s)
        elif isinstance(message, Beat):
            if message.sent_ns:
                now_ns = time.monotonic_ns()  # it is answered as it is received
                self._socket.send(peer, Clock(message.sent_ns, now_ns, now_ns))
            aggregator.beat(message, now_s, time_s)
        elif isinstance(message, AgentEvent):
            aggregator.agent_event(message, now_s, time_s)
        elif isinstance(message, Stack):
            aggregator.stack(message, now_s, time_s)
        elif isinstance(message, Bye) and aggregator.bye(message, now_s, time_s):
            self._socket.send(peer, ByeSeen(message.rank))

    def _shortage(self, hello: Hello, now_s: float) -> str:
        """Raise the limit of open files for the world of a rank that may join; return, and say once, why that fails."""
        world_size = hello.world_size
        if world_size <= self._has_room_for or not self._aggregator.may_join(hello, now_s):
            return ""
        trouble = raise_limit(needed(world_size))
        if not trouble:
            self._has_room_for = world_size
        elif not self._told_shortage:
            self._told_shortage = True
            self._warn(f"a job of {world_size} ranks is refused: {trouble}", "descriptors")
        return trouble

    def _learn(self, hello: Hello) -> None:
        ranks = self._facts.setdefault("ranks", {})
        is_new = str(hello.rank) not in ranks
        entry = {
            "host": hello.host,
            "role": hello.role,
            "devices": [msgspec.to_builtins(device) for device in hello.devices],
        }
        news = [name for name in hello.facts if name not in self._facts] if self._facts_bytes < MAX_FACTS_BYTES else []
        is_changed = ranks.get(str(hello.rank)) != entry
        for name in news[: max(MOST_FACTS - len(self._facts), 0)]:
            self._facts_bytes += len(name) + len(msgspec.json.encode(hello.facts[name]))
            if self._facts_bytes <= MAX_FACTS_BYTES:
                self._facts[name], is_changed = hello.facts[name], True
        ranks[str(hello.rank)] = entry
        self._facts["world_size"] = hello.world_size
        self._has_new_rank = self._has_new_rank or is_new
        self._facts_changed = self._facts_changed or is_changed
        self._has_learned = True
        if is_new and len(ranks) == hello.world_size and is_large(hello.world_size):  # before the first windows come
            self._collect()

    def _tick(self, now_s: float) -> None:
        for event in self._peers.take_events():
            self._aggregator.record(event)
        if repeated := self._peers.take_repeated() + self._door.take_repeated():
            text = "peers that were rejected before were rejected again"
            self._aggregator.record(Event(time.time(), "refused", text, count=repeated))
        self._aggregator.note_own(time.process_time(), self._socket.received_bytes)
        self._look_for_lost(now_s)
        self._aggregator.tick(now_s, time.time(), self._heard_until_s)
        # Those of ten thousand ranks are 8 MB.
        self._tell_facts(max(keep_every_s(self._aggregator.world_size), FACTS_EVERY_S))

    def _look_for_lost(self, now_s: float) -> None:
        """When the job ends, wait no more for agents that were killed."""
        if self._aggregator.is_ending or self._trainer_ended_s is not None:
            waited_for = self._aggregator.awaited(before_s=now_s - quiet_s(self._aggregator.world_size))
            for rank in self._lost.look(now_s, waited_for, self._reaches):
                self._aggregator.give_up(rank, time.time())

    def _reaches(self, rank: int) -> bool:
        peer = self._peers.of_rank(rank)
        return peer is not None and self._socket.send(peer, Ack(0))  # which says nothing

    def _tell_facts(self, every_s: float = 0.0) -> None:
        now_s = time.monotonic()
        if self._facts_changed and now_s - self._told_facts_s >= every_s:
            self._facts_changed, self._has_new_rank, self._told_facts_s = False, False, now_s
            known = {"ranks": dict(self._facts.get("ranks", {})), "parameters": self._aggregator.parameters()}
            facts = {**self._facts, **known}
            self._to_store(lambda store: store.update_facts(facts))

    def _over(self, now_s: float) -> bool:
        """Whether rank 0's trainer is long gone and nobody has been heard for long, so that no farewell will come.

        On a busy machine a trainer may have been killed before its agent, which has all it did and has started us, is
        heard at all: as long as that one lives it is waited for.
        """
        if self._trainer_ended_s is None:
            if _has_ended(self._orders.trainer_descriptor):
                self._trainer_ended_s = now_s
            return False
        if self._aggregator.nobody_is_there and not self._aggregator.is_ending:
            return True  # all were seen to have gone
        is_long = now_s - self._trainer_ended_s > SILENT_AFTER_S or os.getppid() != self._agent
        return is_long and self._aggregator.all_silent(now_s)

    def _hand_out(self, now_s: float) -> None:
        self._take_inbox()
        self._acknowledgement.hand_out(now_s, time.time())
        if events := self._aggregator.take_events():  # ten thousand ranks that join at once would fill a queue
            self._to_store(lambda store: store.write_events(events))
            self._to_sinks(lambda sink: _send_events(sink, events))
        self._inspect()

    def _take_inbox(self) -> None:
        """Take what the sinks' threads report."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, Event):
                    self._aggregator.record(item)
                elif isinstance(item, _Facts):
                    self._facts, self._facts_changed = {**item.facts, **self._facts}, True
                    self._has_git_facts = True
                else:
                    self._acknowledgement.saved(item)

    def _inspect(self) -> None:
        """Ask agents what their trainers are doing, and keep what they answer."""
        for rank in self._aggregator.take_asked():
            if (peer := self._peers.of_rank(rank)) is not None:
                self._socket.send(peer, Inspect("the job has stalled"))
        if files := self._aggregator.take_stacks():

            def write(store: RunFolder) -> None:
                for file in files:
                    store.write_file(f"stacks/{file.name}", file.text)

            self._to_store(write)

    def _put(self, closed: Sequence[Closed]) -> None:
        # In one piece: an agent that comes back brings a thousand windows at once, which would fill a queue.
        # A row names its host, which the run folder learns from the facts of its rank.
        self._tell_facts(0.0 if self._has_new_rank else FACTS_EVERY_S)

        def store_all(store: RunFolder) -> None:
            for report, rows in closed:
                store.write(report, rows)

        def write_all(sink: Sink) -> None:
            for report, _ in closed:
                sink.write(report)

        self._to_store(store_all, len(closed))
        self._to_sinks(write_all, len(closed))

    def _save_state(self, state: bytes, sequences: Sequences) -> None:
        def save(store: RunFolder) -> None:
            if store.save_state(state):  # else the agents keep their copies
                self._inbox.put(sequences)
                os.eventfd_write(self._wake, 1)

        self._to_store(save)

    def _send_acks(self, sequences: Sequences) -> None:
        report = self._aggregator.last_report
        values = {tag: value for tag, value in report.values.items() if "/" not in tag} if report else {}
        iteration, count = report.iteration if report else 0, self._aggregator.report_count
        frames: dict[int, bytes] = {}  # ten thousand ranks are at few places
        for rank, sequence in sequences.items():
            peer = self._peers.of_rank(rank)
            if peer is not None:
                frame = frames.get(sequence)
                if frame is None:
                    frame = frames[sequence] = encode(Ack(sequence, iteration, values, count))
                self._socket.send_frame(peer, frame)

    def _to_sinks(self, work: Callable[[Sink], None], windows: int = 0) -> None:
        for sink in self._sinks.values():
            sink.put(work, windows)

    def _to_store(self, work: Callable[[RunFolder], None], windows: int = 0) -> None:
        if self._store is not None:
            self._store.put(work, windows)

    def _warn(self, text: str, kind: str = "sink") -> None:
        """Make an event of trouble of our own; called from any thread."""
        self._inbox.put(Event(time.time(), kind, text))
        os.eventfd_write(self._wake, 1)

    # --- the end ---

    def _summary(self, ended: bool) -> Summary:
        self._aggregator.note_own(time.process_time(), self._socket.received_bytes)
        summary = self._aggregator.summary(time.time(), ended)
        # Windows that the store has not written yet are before the summary in its queue.
        left_out = {name: sink.left_out + (sink.unfinished if ended else 0) for name, sink in self._sinks.items()}
        left_out[run_folder.NAME] = self._store.left_out if self._store is not None else 0
        return msgspec.structs.replace(
            summary,
            events={**summary.events, **self._peers.refused, **self._door.refused},
            left_out={name: count for name, count in left_out.items() if count},
            status="refused" if ended and self._told_shortage and not self._aggregator.world_size else summary.status,
        )

    def _keep_as_killed(self) -> None:
        """Write the summary that will be true if we are killed before the next one."""
        summary = msgspec.structs.replace(self._summary(ended=False), status="killed")
        self._to_store(lambda store: store.write_summary(summary))

    def _finish(self) -> str:
        self._aggregator.close_all()
        self._tick(time.monotonic())
        self._hand_out(time.monotonic())
        self._git.stop()
        has_heard = self._aggregator.world_size or self._told_shortage
        if not has_heard and self._orders.trainer_descriptor < 0:
            writers = self._writers()
            for writer in writers:
                writer.stop()
            for writer in writers:
                writer.join(SINKS_STOP_S)
            return UNUSED
        if not self._has_git_facts:  # the job is over before git has answered
            self._facts["git_dirty"], self._facts_changed = "unknown", True
        self._tell_facts()
        deadline_s = time.monotonic() + SINKS_STOP_S
        # The run folder last: its summary counts what the sinks have not written by then.
        summary = self._last_summary = self._summary(ended=True)
        sinks = list(self._sinks.values())
        for sink in sinks:
            sink.stop()
        for sink in sinks:
            sink.join(deadline_s - SINKS_STOP_S / 2 - time.monotonic())
        self._hand_out(time.monotonic())
        if self._store is not None:
            summary = self._summary(ended=True)
            state = self._aggregator.snapshot()  # with the farewells: the next attempt reads how this one ended
            self._stop_store(self._store, state, summary, deadline_s)
        self._hand_out(time.monotonic())
        if summary.status == "completed" and self._folder is not None:
            with contextlib.suppress(OSError):  # what is over is not gone on with
                own_files.remove_file(self._folder / STATE)
        return summary.status

    def _stop_store(self, store: Writer[RunFolder], state: bytes, summary: Summary, deadline_s: float) -> None:
        def last(opened: RunFolder) -> None:
            opened.save_state(state)
            opened.write_summary(summary)

        store.stop(last)
        if not store.join(deadline_s - time.monotonic()):
            self._let_go()
            store.join(DISK_WAIT_S)

    def _writers(self) -> list[Writer[Any]]:
        return [*self._sinks.values(), *([self._store] if self._store is not None else [])]

    def _let_go(self) -> None:
        """Let whoever reads the job's output see its end, while a disk that stands still is waited for."""
        if self._orders.trainer_descriptor >= 0:
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            for descriptor in (self._orders.stdout_descriptor, 2):
                os.dup2(null, descriptor)
            os.close(null)


def _event_files(config: Config, folder: Path | None, facts: Mapping[str, Any]) -> Path | None:
    """Return where TensorBoard's event file goes: where the user says, beside the framework's own, or the run folder.

    TensorBoard forgets points where one folder has two event files at a time, so ours has a folder below the
    framework's.  That one may be on another host's disk, as the framework may write from another rank.
    """
    if config.tensorboard_dir:
        return Path(config.tensorboard_dir)
    framework_folder = str(facts.get("tensorboard_dir") or "")
    if framework_folder and os.path.isdir(framework_folder) and os.access(framework_folder, os.W_OK):  # noqa: PTH112
        return Path(framework_folder) / "efficientllm"
    return folder / "tensorboard" if folder else None


def _send_events(sink: Sink, events: Iterable[Event]) -> None:
    if (write := getattr(sink, "event", None)) is not None:
        for event in events:
            write(event)


def _has_ended(pidfd: int) -> bool:
    if pidfd < 0:
        return False
    return bool(select.select([pidfd], [], [], 0)[0])


def main(arguments: list[str]) -> int:
    """Run the aggregator that the JSON on the descriptor ``arguments[0]`` orders."""
    # It ends with its job, by protocol; a scheduler's SIGTERM reaches trainers too, which may still save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until there is somebody to tell
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(arguments[0])
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as file:
        orders = msgspec.json.decode(file.read(), type=Orders)
    stdout = os.fdopen(orders.stdout_descriptor, "w", encoding="utf-8", errors="replace", closefd=False)
    server = Server(orders, stdout)
    signal.signal(signal.SIGTERM, server.warn_of_kill)
    server.run()
    # A sink that hangs has a thread that cannot be joined.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
