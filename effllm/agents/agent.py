"""The agent's process, one beside each rank: edges only.

It is exec'ed, never forked, in a session of its own, and tied to its trainer by a pidfd: when the
trainer is gone it drains the ring, sends the rest, says goodbye and exits within five seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from effllm import __version__, node_power
from effllm.agents import trainer_process
from effllm.agents.aggregator_child import AggregatorChild
from effllm.agents.events import AgentEvents
from effllm.agents.inspection import Finding
from effllm.agents.inspection import Orders as InspectionOrders
from effllm.agents.inspection_child import InspectionChild
from effllm.agents.log import LogFile
from effllm.agents.sampler import Sampler
from effllm.agents.track import EDGE_WAIT_S, Track
from effllm.agents.window import Series, WindowCutter
from effllm.aggregation.orders import Orders
from effllm.config import Config, cache_folder, secret_path
from effllm.devices import DeviceUnavailable, Site, open_device
from effllm.energy.calibration import assumed, calibrate
from effllm.health.clock import Exchanges
from effllm.health.hang import BEATS, WAITING
from effllm.network import discovery, secret
from effllm.network.curve import AgentKeys
from effllm.network.transport import AgentLink, Outbox, make_context
from effllm.runs.plain_text import one_line
from effllm.runs.run_lock import name_of_run
from effllm.schema import (
    MARKED_PHASES,
    MOST_TEXT,
    Ack,
    AgentEvent,
    Beat,
    Bye,
    ByeSeen,
    Device,
    Event,
    FromAggregator,
    Hello,
    Inspect,
    Parameters,
    Refused,
    Reports,
    Sample,
    Sensor,
    Stack,
    Welcome,
)
from effllm.training.ring import BETWEEN, ITERATION, PHASE_STATE, STARTUP, STATE_NAMES, STEP, Board, RingReader, Slot
from effllm.training.ring import END as END_RECORD

BEAT_S = 5.0
CALIBRATION_S = 3.0  # windows are cut when it is known how the sensor behaves
LOSS_WAIT_S = 0.5  # a window's loss comes after its end
HELLO_AGAIN_S = 2.0
DEVICE_WAIT_S = 3.0
NOBODY_ANSWERS_S = 10.0
LAST_WORDS_S = 4.0
REPORT_EVERY_S = 0.25  # between two frames of reports: 256 rows a frame are enough for windows of a millisecond
SEND_AGAIN_S = 0.1
AGGREGATOR_ENDS_S = 4.7
REPLACED_WITHIN_S = 1.5  # an aggregator that died; one that is gone for longer has ended
LEAST_LOOP_S = 0.05  # iterations of a millisecond must not wake us a thousand times a second
FOLD_FROM, FOLD_EVERY_S = 600, 30.0  # samples of a device that are kept as they are, and when that is looked at
STATUSES = ("completed", "failed", "killed", "interrupted")


class Agent:
    """Reads the ring, samples the device, sends windows."""

    def __init__(
        self, ring: RingReader, board: Board, trainer: int, wake: int, ready: int, facts: dict[str, Any]
    ) -> None:
        self._ring, self._board = ring, board
        self._trainer, self._wake, self._ready = trainer, wake, ready
        self._facts = facts
        self._config = Config.from_dict(facts["config"])
        self._place: dict[str, Any] = facts["place"]
        self._rank: int = self._place["rank"]
        self._id = uuid.uuid4().hex[:16]
        self._log = LogFile(self._rank)
        self._events = AgentEvents(self._log)
        self._sampled = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        interval_s = self._config.collection_interval_s
        sampler = Sampler(self._open, interval_s, self._events.add, self._sampled, self._calibrate)
        calibrations = cache_folder() / "calibration"
        self._tracks = [Track(sampler, interval_s, calibrations)]
        self._gpus = _shown(facts.get("gpus", []), facts.get("visible_devices"))
        for index in self._gpus[1:]:
            other = Sampler(
                partial(self._open_other, index), interval_s, self._events.add, self._sampled, self._calibrate
            )
            self._tracks.append(Track(other, interval_s, calibrations))
        self._outbox = Outbox(self._config.history_size)
        self._cutter: WindowCutter | None = None
        self._link: AgentLink | None = None
        self._context = make_context()
        self._poller = zmq.Poller()
        self._welcome: Welcome | None = None
        self._refused = ""
        self._is_put_off = False  # until there is another address
        self._target = ("", "")  # the endpoint and job of the link
        self._hello_s = 0.0
        self._has_news = False  # facts or devices that the last HELLO did not have
        self._started_s = time.monotonic()
        self._told_silence = False
        self._status: str | None = None
        self._end_ns = 0
        self._bye_sent = self._bye_seen = False
        self._aggregator: AggregatorChild | None = None
        self._watched_child = -1
        self._next_beat_s = 0.0
        self._next_frame_s = 0.0
        self._clock = Exchanges(self._place["world_size"], self._rank)  # with the aggregator's
        self._heard: list[tuple[int, FromAggregator]] = []  # when, and what, since the last look
        self._inspection = InspectionChild()
        self._stack: Finding | None = None  # that is to be sent
        self._next_fold_s = 0.0
        self._beat_s = min(BEAT_S, self._config.stall_seconds / BEATS)
        self._busy_trainer = False
        self._has_baseline = False
        self._connected_s = 0.0  # when the link was last seen connected, at the end
        self._address: dict[str, str] = {}  # found after the start

    def run(self) -> None:
        """Live as long as the trainer, and a little longer."""
        if self._trainer >= 0:
            self._poller.register(self._trainer, zmq.POLLIN)
        self._poller.register(self._sampled, zmq.POLLIN)
        self._start_aggregator()
        self._connect()
        for track in self._tracks:
            track.sampler.start()
        self._wait_for_device()
        self._wait_for_others()
        self._start_node_sensors()
        self._start_cutting()
        os.eventfd_write(self._ready, 1)
        self._poller.register(self._wake, zmq.POLLIN)
        while self._status is None:
            self._step()
        self._last_words()

    # --- start ---

    def _open_other(self, index: int) -> Any:
        reader = self._open(index)
        if not reader.device.is_gpu:
            reader.close()
            raise DeviceUnavailable(f"there is no GPU {index} here")
        return reader

    def _open(self, index: int | None = None) -> Any:
        """Open the GPU of this rank, or the one at ``index`` of those it sees; of several it told of, the first."""
        if index is None and self._gpus:
            index = self._gpus[0]
        site = Site(
            local_rank=self._place["local_rank"] if index is None else index,
            trainer_pid=self._facts["trainer_pid"],
            host=self._facts["host"],
            cuda_uuid=self._facts.get("cuda_uuid", "") if index is None else "",
            cuda_pci_bus_id=self._facts.get("cuda_pci_bus_id", "") if index is None else "",
            visible_devices=self._facts.get("visible_devices"),
            hip_visible_devices=self._facts.get("hip_visible_devices"),
            rocr_visible_devices=self._facts.get("rocr_visible_devices"),
            power_scope=self._config.power_scope,
            excluded_pids=frozenset((os.getpid(),)),
        )
        reader = open_device(self._config.device, site)
        reader.device = replace(reader.device, sensor=assumed(reader.device))
        return reader

    def _calibrate(self, device: Device, read: Callable[[], Sample], is_suspect: bool) -> Sensor:
        def report(text: str) -> None:
            self._events.add(Event(time.time(), "energy_calibration", f"{device.key}: {text}", device=device.key))

        return calibrate(device, read, cache_folder() / "calibration", is_suspect=is_suspect, report=report)

    @property
    def _series(self) -> list[Series]:
        return [track.series for track in self._tracks if track.series is not None]

    def _start_aggregator(self) -> None:
        listen = self._facts.get("listen_descriptor", -1)
        if listen < 0:
            return
        orders = Orders(
            config=self._facts["config"],
            job=self._facts["job"],
            endpoint=self._facts["endpoint"],
            folder=self._facts["run_folder"],
            by_agent=True,
            listen_descriptor=listen,
            stdout_descriptor=self._facts["stdout_descriptor"],
            trainer_descriptor=self._trainer,
            facts=self._facts.get("run", {}),
            run=name_of_run(self._place, self._facts["host"]),
            secured=bool(self._facts.get("secured")),
            salt=self._facts["job"],
        )
        self._aggregator = AggregatorChild(orders, self._events.add)
        self._aggregator.start()
        self._watch_child()

    def _watch_child(self) -> None:
        child = self._aggregator
        if child and child.descriptor != self._watched_child:
            if self._watched_child >= 0:
                self._poller.unregister(self._watched_child)
            self._watched_child = child.descriptor
            if self._watched_child >= 0:
                self._poller.register(self._watched_child, zmq.POLLIN)

    def _connect(self) -> None:
        """Have a link to the aggregator that is known now: rank 0 may come back at another address."""
        endpoint = self._facts.get("endpoint", "")
        target = (endpoint, self._facts.get("job", ""))
        if not endpoint or target == self._target:
            return
        self._target = target
        self._disconnect()
        keys: AgentKeys | None = None
        if self._facts.get("secured"):
            try:
                keys = AgentKeys.of(secret.read(secret_path(self._config)), self._facts["job"])
            except secret.SecretError as error:
                self._tell_person(f"no metrics of this rank: {error}")
                return
        self._link = AgentLink(self._context, endpoint, keys)
        self._link.connect()
        self._poller.register(self._link.socket, zmq.POLLIN)
        self._poller.register(self._link.monitor, zmq.POLLIN)

    def _disconnect(self) -> None:
        if self._link is None:
            return
        self._poller.unregister(self._link.socket)
        self._poller.unregister(self._link.monitor)
        self._link.close()
        self._link = None
        self._welcome = None
        self._refused = ""
        self._is_put_off = self._bye_sent = self._bye_seen = False
        self._outbox.send_again()

    def _tell_person(self, text: str) -> None:
        """Log a line, and say it once per host."""
        self._events.report("agent", text)
        if self._place["local_rank"] == 0:
            self._told_silence = True
            _say(text)

    def _wait_for_device(self, timeout_s: float = DEVICE_WAIT_S) -> None:
        poll = select.poll()
        poll.register(self._sampled, select.POLLIN)
        if poll.poll(timeout_s * 1000):
            os.eventfd_read(self._sampled)

    def _wait_for_others(self) -> None:
        """Wait for the first samples of the further GPUs: rows begin where all of them are known."""
        until_s = self._started_s + DEVICE_WAIT_S
        while len(self._tracks) > 1 and time.monotonic() < until_s:
            self._take_samples()
            if all(track.series or track.sampler.unavailable for track in self._tracks):
                return
            self._wait_for_device(0.05)

    def _start_node_sensors(self) -> None:
        """Read what the node draws beside its GPUs: once per node, and never beside a device that is simulated."""
        own = self._tracks[0].sampler.device
        if self._place["local_rank"] != 0 or (own is not None and own.simulated):
            return
        credentials = self._config.node_power_credentials
        for opener in node_power.openers(
            self._config.node_power, self._facts["host"], Path(credentials) if credentials else None
        ):
            if opener.name == "cpu" and own is not None and own.kind == "host":
                continue  # it reads them itself
            interval_s = max(opener.interval_s, self._config.collection_interval_s)
            sampler = Sampler(opener.open, interval_s, self._events.add, self._sampled, is_node_sensor=True)
            self._tracks.append(Track(sampler, interval_s))
            sampler.start()
        # The scope of the job's power is chosen when its first window closes.
        until_s = self._started_s + DEVICE_WAIT_S
        while any(track.sampler.is_opening for track in self._tracks) and time.monotonic() < until_s:
            self._wait_for_device(0.05)

    def _start_cutting(self) -> None:
        origin_ns = time.monotonic_ns()
        self._take_samples()
        if self._series and self._series[0].newest_ns:
            origin_ns = max(series.oldest_ns for series in self._series)  # from when on all is known
        slots = self._ring.read()
        begun = [slot.start_ns for slot in slots if slot.kind == ITERATION and slot.ordinal == 1]
        state, ordinal, since_ns, _ = self._ring.state()
        if state == STEP and ordinal == 1:
            begun.append(since_ns)
        self._cutter = WindowCutter(
            agent=self._id,
            rank=self._rank,
            log_interval=self._config.log_interval,
            offset=self._facts.get("first_iteration", 0),
            origin_ns=min([origin_ns, *begun]),
            unix_minus_monotonic_s=time.time() - time.monotonic(),
        )
        self._take_slots(slots)

    # --- the loop ---

    def _step(self) -> None:
        events = dict(self._poller.poll(self._timeout_ms()))
        began_s = time.monotonic()
        self._listen()  # first of all, for a clock's answer ages
        if self._link is not None and events.keys() == {self._link.socket}:
            self._talk(began_s)  # an answer: nothing else has come, and what is due by time is seen to after it
        else:
            self._look(self._trainer in events or self._is_orphan())
        if self._wake in events:
            # Whoever iterates faster than this is read in batches.
            rest_s = LEAST_LOOP_S - (time.monotonic() - began_s)
            if self._busy_trainer and rest_s > 0:
                time.sleep(rest_s)
            self._busy_trainer = True
        else:
            self._busy_trainer = False

    def _is_orphan(self) -> bool:
        return self._trainer < 0 and os.getppid() != self._facts["trainer_pid"]

    @property
    def _is_calibrating(self) -> bool:
        return any(track.sampler.is_calibrating for track in self._tracks)

    def _timeout_ms(self) -> int:
        now_s = time.monotonic()
        until_s = min(self._next_beat_s, self._clock.due_s(now_s)) if self._welcome else now_s + 1.0
        if self._trainer < 0:
            until_s = min(until_s, now_s + 1.0)
        ended = self._cutter.ended if self._cutter else None
        if ended is not None:
            for wait_s in (LOSS_WAIT_S, EDGE_WAIT_S):
                if ended.end_ns * 1e-9 + wait_s > now_s:
                    until_s = min(until_s, ended.end_ns * 1e-9 + wait_s)
                    break
            else:
                until_s = now_s + (LEAST_LOOP_S if self._is_calibrating else 0.0)
        if self._link and self._link.connected and not self._welcome:
            until_s = min(until_s, self._hello_s + HELLO_AGAIN_S)
        if self._outbox.num_unsent and self._welcome:
            until_s = min(until_s, max(self._next_frame_s, now_s))
        if self._aggregator:
            until_s = min(until_s, self._aggregator.due_s)
        until_s = min(until_s, self._inspection.due_s)
        return max(int((until_s - now_s) * 1000) + 1, 0)

    def _look(self, trainer_gone: bool) -> None:
        """Take whatever is there, and send whatever can go."""
        now_s = time.monotonic()
        for descriptor in (self._wake, self._sampled):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(descriptor)
        self._take_facts()
        self._take_samples()
        self._take_slots(self._ring.read())
        if trainer_gone and self._status is None:
            self._take_slots(self._ring.read())
            self._status, self._end_ns = "killed", time.monotonic_ns()
        self._cut(now_s)
        self._talk(now_s)
        if self._aggregator:
            self._aggregator.look(now_s)
            self._watch_child()
        if now_s >= self._next_fold_s:
            self._next_fold_s = now_s + FOLD_EVERY_S
            self._fold()

    def _fold(self) -> None:
        """Sum up samples while no window ends, for a loop may stand for days: 0.9 kB for each would be 75 MB a day."""
        assert self._cutter is not None
        if not any(series.num_kept > FOLD_FROM for series in self._series):
            return
        until_ns = time.monotonic_ns()
        self._take_slots(self._ring.read())
        edges_ns = [*self._cutter.moments_ns, self._ring.state()[2]]
        if not self._has_baseline:
            edges_ns += self._facts.get("baseline_ns") or []
        for series in self._series:
            series.fold(edges_ns, until_ns)

    def _take_facts(self) -> None:
        address = self._ring.address()
        if address is not None and "failed" in address:
            self._tell_person(address["failed"])
        elif address is not None and "refused" in address:
            self._told_silence = True  # rank 0 has said it
            self._events.report("agent", f"rank 0 has no aggregator: {one_line(address['refused'])}")
        elif address is not None:
            self._address = address
            self._facts.update(address)
            self._connect()
        facts = self._ring.facts()
        if facts is None:
            return
        facts.update(self._address)
        for text in facts.get("warnings", [])[len(self._facts.get("warnings", [])) :]:
            self._events.report("warning", text)
        self._facts = facts
        self._has_news = True
        self._connect()

    def _take_samples(self) -> None:
        news = [track.take() for track in self._tracks]
        if (stretch := self._facts.get("baseline_ns")) and not self._has_baseline:
            self._has_baseline = all(track.note_baseline(*stretch) for track in self._tracks if track.series)
            news.append(self._has_baseline)
        now_ns, time_s = time.monotonic_ns(), time.time()
        for event in (event for track in self._tracks for event in track.take_events(now_ns, time_s)):
            self._events.add(event)
        self._has_news = self._has_news or any(news)

    def _take_slots(self, slots: list[Slot]) -> None:
        assert self._cutter is not None
        for slot in slots:
            if slot.kind == END_RECORD and self._status is None:
                self._status, self._end_ns = STATUSES[slot.what], slot.end_ns
            self._cutter.add(slot)

    def _cut(self, now_s: float) -> None:
        assert self._cutter is not None
        # An edge is told by the two ticks after it, in which the next window may end already.
        for edge_ns in self._cutter.edges_ns:
            for track in self._tracks:
                track.ask(edge_ns)
        while (ended := self._cutter.ended) is not None:
            edge = all(track.is_settled(ended.end_ns) for track in self._tracks)
            _, ordinal, _, _ = self._ring.state()
            moved_on = ordinal > ended.ordinal or self._cutter.last_ordinal > ended.ordinal or self._status is not None
            waited_s = now_s - ended.end_ns * 1e-9
            patience_s = CALIBRATION_S if self._is_calibrating else EDGE_WAIT_S
            if (not edge and waited_s < patience_s) or (not moved_on and waited_s < LOSS_WAIT_S):
                return
            row = self._cutter.cut(self._series)
            if row is not None:
                self._outbox.add(row)

    def _talk(self, now_s: float) -> None:
        link = self._link
        if link is None:
            self._complain(now_s)
            return
        if link.is_new():
            self._welcome = None
            self._outbox.send_again()
            self._bye_sent = self._bye_seen = False
            self._clock.forget()
            self._say_hello(now_s)
        elif link.connected and not self._welcome and self._may_ask and now_s - self._hello_s > HELLO_AGAIN_S:
            self._say_hello(now_s)
        self._listen()
        heard, self._heard = self._heard, []
        for heard_ns, message in heard:
            self._hear(message, heard_ns)
        if self._welcome is None:
            self._complain(now_s)
            return
        if self._has_news:  # since the last HELLO, which may have been before the WELCOME
            self._say_hello(now_s)
        self._send_reports(link, now_s)
        while (event := self._events.unsent()) is not None:
            if not link.send(AgentEvent(self._id, self._rank, event)):
                break
            self._events.sent()
        self._take_inspection(now_s)
        if self._stack is not None:
            stack = Stack(self._id, self._rank, self._ring.state()[1], self._stack.text, self._stack.top[:MOST_TEXT])
            if link.send(stack):
                self._stack = None
        if now_s >= min(self._next_beat_s, self._clock.due_s(now_s)):
            self._next_beat_s = now_s + self._beat_s
            link.send(self._beat(now_s))

    def _beat(self, now_s: float) -> Beat:
        state, ordinal, since_ns, what = self._ring.state()
        name = MARKED_PHASES[what] if state == PHASE_STATE else STATE_NAMES[state]
        if state in (STARTUP, BETWEEN) and self._facts.get("serves_requests"):
            name = WAITING
        offset = self._clock.offset(time.monotonic_ns())
        return Beat(
            agent=self._id,
            rank=self._rank,
            ordinal=ordinal,
            state=name,
            since_s=max(now_s - since_ns * 1e-9, 0.0),
            lost=self._outbox.lost,
            offset_s=offset.offset_s if offset else None,
            offset_error_s=offset.error_s if offset else None,
            **self._readings(),
            process=trainer_process.state(self._facts["trainer_pid"]),
            time_s=self._time_s(),
            # The last thing before it goes.
            sent_ns=self._clock.ask(time.monotonic_ns()) if now_s >= self._clock.due_s(now_s) else 0,
        )

    def _time_s(self) -> float | None:
        """Return the time of the clock that rows are stamped with."""
        return self._cutter.unix_s(time.monotonic_ns()) if self._cutter else None

    def _readings(self) -> dict[str, float | None]:
        """Return the newest utilization and power of the rank's first device."""
        newest = self._tracks[0].series.newest if self._tracks[0].series else None
        return {"utilization": newest.utilization, "power_w": newest.power_w} if newest else {}

    def _start_inspection(self) -> None:
        """Look at our own trainer, in a process of its own: the aggregator wants to know why it stands."""
        orders = InspectionOrders(
            pid=self._facts["trainer_pid"],
            rank=self._rank,
            trainer=self._trainer,
            folder=self._welcome.run_folder if self._welcome else "",
            name=f"rank-{self._rank}-iteration-{self._ring.state()[1] + self._facts.get('first_iteration', 0)}",
        )
        if why := self._inspection.start(orders, time.monotonic()):
            self._stack = Finding(f"no stacks: {why}\n", f"unknown: {why}")
        elif self._inspection.descriptor >= 0:
            self._poller.register(self._inspection.descriptor, zmq.POLLIN)

    def _take_inspection(self, now_s: float) -> None:
        descriptor = self._inspection.descriptor
        if (found := self._inspection.look(now_s)) is not None:
            if descriptor >= 0:
                self._poller.unregister(descriptor)
            self._stack = found

    def _listen(self) -> None:
        """Take what has come, and stamp when."""
        if self._link is not None and (messages := self._link.receive()):
            heard_ns = time.monotonic_ns()
            self._heard += [(heard_ns, message) for message in messages]

    def _spent(self) -> tuple[float, int, float | None]:
        """Return what this rank's measuring has cost: our CPU seconds, bytes, and the recorder's seconds, estimated."""
        pair_s = self._facts.get("recorder_pair_s")
        ordinal = self._cutter.last_ordinal if self._cutter else 0
        return time.process_time(), self._link.sent_bytes if self._link else 0, pair_s and pair_s * ordinal

    def _send_reports(self, link: AgentLink, now_s: float) -> None:
        if now_s < self._next_frame_s and self._status is None:
            return
        while rows := self._outbox.unsent():
            if not link.send(Reports(tuple(rows), self._outbox.lost, *self._spent())):
                self._next_frame_s = now_s + SEND_AGAIN_S
                return
            self._outbox.sent(len(rows))
            self._next_frame_s = now_s + max(REPORT_EVERY_S, self._welcome.report_every_s if self._welcome else 0.0)
            self._next_beat_s = now_s + self._beat_s  # a sign of life as well

    def _say_hello(self, now_s: float) -> None:
        self._hello_s = now_s
        given = self._facts.get("parameters", {})
        hello = Hello(
            job=self._facts["job"],
            agent=self._id,
            rank=self._rank,
            local_rank=self._place["local_rank"],
            world_size=self._place["world_size"],
            host=self._facts["host"],
            role=self._config.role,
            devices=tuple(series.device for series in self._series),
            parameters=Parameters(
                given.get("total"), given.get("trainable"), given.get("active"), bool(given.get("is_share"))
            ),
            log_interval=self._config.log_interval,
            trainer_pid=self._facts["trainer_pid"],
            offset=self._facts.get("first_iteration", 0),
            total_iterations=self._facts.get("total_iterations"),
            flops_per_token=self._facts.get("flops_per_token"),
            facts=self._facts.get("run", {}) if self._rank == 0 else {},
            version=__version__,
            hardware_flops_per_token=self._facts.get("hardware_flops_per_token"),
            is_numbered=bool(self._facts.get("is_numbered")),
            peer_group=self._facts.get("peer_group", ""),
            replica=self._facts.get("replica", ""),
            time_s=self._time_s(),
            start_time_s=self._cutter.start_time_s if self._cutter else None,
        )
        if self._link:
            self._has_news = not self._link.send(hello)

    def _hear(self, message: FromAggregator, heard_ns: int) -> None:
        if isinstance(message, Welcome):
            self._welcome = message
            if self._board.welcome() != self._target[0]:  # for which the trainer's search is waiting
                self._board.write({**self._board.read(), "welcome": self._target[0]})
            if message.again:
                self._outbox.send_again()
                self._bye_sent = False
                self._say_hello(time.monotonic())
            if message.run_folder and Path(message.run_folder).is_dir():
                self._log.attach(Path(message.run_folder) / "logs")
            _silence_stderr()
        elif isinstance(message, Ack):
            self._outbox.acknowledged(message.sequence)
            if message.report:
                document = {"report": message.report, "iteration": message.iteration, "values": message.values}
                self._board.write({**document, "welcome": self._target[0]})
        elif isinstance(message, Refused):
            if message.again:
                self._is_put_off = True  # this aggregator is ending: another will have another address
            elif message.whole_job:
                self._disconnect()  # whoever waits for this connection's place is told as well
                self._refuse(message.reason)
                if self._rank == 0:
                    _say(f"no metrics, training goes on: {message.reason}")
            elif message.reason != self._refused:
                self._refuse(message.reason)
                _say(f"rank {self._rank} is left out of the metrics: {message.reason}")
        elif isinstance(message, ByeSeen):
            self._bye_seen = True
        elif isinstance(message, Inspect):
            self._start_inspection()
        else:
            self._clock.add(message.sent_ns, message.received_ns, message.answered_ns, heard_ns)

    def _refuse(self, reason: str) -> None:
        self._refused = reason
        self._events.report("agent", f"refused: {reason}")

    @property
    def _may_ask(self) -> bool:
        return not self._refused and not self._is_put_off

    def _complain(self, now_s: float) -> None:
        if self._told_silence or now_s - self._started_s < NOBODY_ANSWERS_S or self._refused:
            return
        self._told_silence = True
        where = self._facts.get("endpoint", "")
        text = f"no aggregator answers at {where}" if where else "rank 0 has not published its address"
        self._events.report("agent", text)
        if self._place["local_rank"] == 0:
            _say(f"{text}: no metrics are shown until one does; training goes on")

    # --- the end ---

    def _last_words(self) -> None:
        """Cut what is left, send it, and say goodbye: four seconds at most, with or without an answer."""
        began_s = time.monotonic()
        if self._trainer >= 0:
            self._poller.unregister(self._trainer)
        self._poller.unregister(self._wake)
        self._wait_for_edge(began_s)
        assert self._cutter is not None
        self._ring.skip_torn()
        for slot in self._ring.read():
            self._cutter.add(slot)
        while (row := self._cutter.cut(self._series)) is not None:
            self._outbox.add(row)
        self._outbox.add(self._cutter.cut_rest(self._series, self._end_ns))
        self._events.end()
        while time.monotonic() - began_s < LAST_WORDS_S and not self._refused:
            self._look(trainer_gone=False)
            if self._welcome and not self._outbox.num_unsent and not self._bye_sent:
                last = self._cutter.last_ordinal
                end_s = self._cutter.unix_s(self._end_ns)
                self._bye_sent = bool(self._link) and self._link.send(  # type: ignore[union-attr]
                    Bye(self._id, self._rank, self._status or "killed", last, self._outbox.lost, *self._spent(), end_s)
                )
            if self._is_heard(time.monotonic()):
                break
            self._poller.poll(50)
        if len(self._outbox) and not self._bye_seen and not self._refused:
            where = self._facts.get("endpoint", "no address")
            self._events.report("agent", f"{len(self._outbox)} reports could not be delivered to {where}")
            if self._place["local_rank"] == 0:
                _say(f"rank {self._rank}: {len(self._outbox)} reports could not be delivered to {where}")
        while self._aggregator and not self._aggregator.done and time.monotonic() - began_s < AGGREGATOR_ENDS_S:
            self._poller.poll(20)
            self._look(trainer_gone=False)
        self._inspection.stop()
        for track in self._tracks:
            track.sampler.stop(0.2)
        self._log.close()
        if path := self._facts.get("address_file"):
            discovery.remove(Path(path), self._facts["job"])
        if self._link:
            self._link.close()
        self._context.destroy(linger=200)

    def _is_heard(self, now_s: float) -> bool:
        """Whether the aggregator has all there is.

        What it says last may be lost: a link with ZMQ_IMMEDIATE drops what is unread when the connection ends.
        """
        if self._aggregator and self._aggregator.done:
            return True
        if self._link and self._link.connected:
            self._connected_s = now_s
        may_come_back = self._aggregator or now_s - self._connected_s < REPLACED_WITHIN_S
        return self._bye_seen and not (len(self._outbox) and may_come_back)

    def fail(self, error: Exception) -> None:
        """Leave the trace of an error of ours in the log."""
        self._events.report("agent", "".join(traceback.format_exception(error)).rstrip())
        self._log.close()

    def _wait_for_edge(self, began_s: float) -> None:
        for track in self._tracks:
            track.ask(self._end_ns)
        while time.monotonic() - began_s < LOSS_WAIT_S:
            self._take_samples()
            if all(track.is_settled(self._end_ns) for track in self._tracks):
                return
            self._poller.poll(20)


def _shown(gpus: Sequence[int], visible: str | None) -> list[int]:
    """Return the GPUs that a process told of, without those that it cannot see."""
    return [index for index in gpus if visible is None or index < len(visible.split(","))]


def _say(text: str) -> None:
    """Write one line for the person, as long as nobody else has taken over telling."""
    with contextlib.suppress(OSError):
        os.write(2, f"[EfficientLLM] {text}\n".encode())


def _silence_stderr() -> None:
    # An inherited descriptor would keep `torchrun ... 2>&1 | tee` waiting for us.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def main(arguments: list[str]) -> int:
    """Run the agent on the descriptors that its trainer passed."""
    parser = argparse.ArgumentParser(prog="effllm.agents.agent")
    for name in ("ring", "board", "trainer", "wake", "ready"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of the trainer is our end, not before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)
    ring = RingReader(given.ring)
    agent: Agent | None = None
    try:
        agent = Agent(ring, Board(given.board), given.trainer, given.wake, given.ready, ring.facts() or {})
        agent.run()
    except Exception as error:  # noqa: BLE001 - the edge of the process: nothing above it may learn of this but by a line
        _say(f"an agent stopped, its rank has no metrics from now on: {type(error).__name__}: {error}")
        if agent:
            agent.fail(error)
        os._exit(1)
    os._exit(0)  # a device call that hangs has a thread that cannot be joined


if __name__ == "__main__":
    main(sys.argv[1:])
