"""A process of ``effllm simulate`` with some of the ranks: real sockets and messages, without training."""

from __future__ import annotations

import os
import select
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from effllm.devices import Site
from effllm.devices.simulated import MAX_CLOCK_HZ, open_device
from effllm.network import secret
from effllm.network.curve import AgentKeys
from effllm.network.listening import raise_open_files_limit
from effllm.network.transport import Link, Outbox, make_context
from effllm.records.energy import EnergyAmount
from effllm.records.rank import CLOCK_RATIO, Allocator, DeviceWindow, Gauge, Integrals, ParameterCount, RankReport
from effllm.records.wire import Ack, Bye, ByeSeen, Heartbeat, Hello, Rejected, Welcome

HEARTBEAT_S = 5.0  # the period of heartbeats of real agents
HELLO_AGAIN_S = 10.0  # ten thousand handshakes with keys take a few seconds
LEAVE_WITHIN_S = 60.0
CONFIRM_WITHIN_S = 1.5  # real agents wait this long for the last message, which may be lost when the connection ends
CHECK_EVERY = 64  # number of peers between two checks of rank 0's messages
IDLE_S = 0.005
MAX_JOINING = 250  # concurrent handshakes of a process; on one machine, more handshakes do not finish earlier
MAX_UNCONFIRMED = 100_000

RANKS_PER_NODE = 8
PARAMETERS = 7_000_000_000
TOKENS = 4096  # tokens per iteration; each rank adds its rank number, so that any lost report changes the sum
STEP_SHARE = 0.95  # step time as a share of an iteration
CLOCK_HZ, TEMPERATURE_C, LIMIT_W = 1.7e9, 61.0, 700.0
CLOCK_SHARE = CLOCK_HZ / MAX_CLOCK_HZ
#: The readings of torch's allocator that each rank with CUDA reports in each window (effllm/agent/measuring.py).
ALLOCATOR_BYTES = (40e9, 45e9, 1e9)  # allocated, reserved, fragmented


class Part(Struct, frozen=True):
    """The simulated ranks of one process, and their settings."""

    first_rank: int
    num_ranks: int
    world_size: int
    endpoint: str
    job: str
    log_interval: int
    interval_s: float
    windows: int
    spread_s: float  # seconds in which the reports of one window are sent
    input_descriptor: int  # receives one line: the start time of the first window
    output_descriptor: int  # receives lines of Progress
    secret_file: str = ""  # empty: no keys
    salt: str = ""


class Progress(Struct, omit_defaults=True):
    """A line with the progress of the ranks; times are monotonic times of the host."""

    joined: int = 0
    sent: int = 0  # number of sent reports
    window: int = 0  # a window whose last report was sent at at_s
    at_s: float = 0.0
    seen_window: int = 0  # newest window with values at rank 0, received at at_s
    rejected: str = ""
    done: bool = False
    tokens: int = 0  # of all reports
    tokens_confirmed: int = 0  # of the reports that the aggregator has confirmed
    energy_j: float = 0.0
    lost: int = 0
    unconfirmed: int = 0


class SimulatedRank:
    """The messages of one rank: its HELLO, windows of known length on simulated GPUs, and its BYE. No I/O.

    The exact sums of its reports are known; the sums in the summary must be equal to them, to the last token.
    """

    def __init__(self, rank: int, world_size: int, job: str, agent: str, log_interval: int) -> None:
        self.rank, self._world_size, self._log_interval = rank, world_size, log_interval
        self._job, self.agent = job, agent
        self._host = f"node{rank // RANKS_PER_NODE:05d}"
        reader = open_device(Site(local_rank=rank % RANKS_PER_NODE, host=self._host))
        self._device, self._wave = reader.device, reader.waveform
        self._window = 0  # the newest window with a report
        self.tokens = 0  # of all its reports
        self.energy_j = 0.0  # of all its reports

    def hello(self) -> Hello:
        return Hello(
            job=self._job,
            agent=self.agent,
            rank=self.rank,
            local_rank=self.rank % RANKS_PER_NODE,
            world_size=self._world_size,
            host=self._host,
            role="trainer",
            devices=(self._device,),
            parameters=ParameterCount(total=PARAMETERS),
            log_interval=self._log_interval,
        )

    def next_report(self, start_s: float, end_s: float, unix_minus_monotonic_s: float) -> RankReport:
        """Return the report of the next window, and count it; ``start_s`` and ``end_s`` are monotonic times."""
        self._window += 1
        span_s, wave = end_s - start_s, self._wave
        last = self._window * self._log_interval
        tokens = self.tokens_of_first(1)
        energy_j = wave.energy_j(start_s, end_s)
        self.tokens += tokens
        self.energy_j += energy_j
        memory, utilization = wave.memory_byte_seconds(start_s, end_s), wave.utilization_seconds(start_s, end_s)
        power_w = energy_j / span_s
        energy = EnergyAmount(energy_j, span_s, gain_j=self._device.sensor.gain_error * energy_j)
        device = DeviceWindow(
            self._device.key,
            Integrals(energy, memory, span_s, utilization, span_s),
            memory_peak_bytes=memory / span_s,
            power_peak_w=power_w,
            energy_method="counter",
            gauges={
                "sm_clock_hz": Gauge(CLOCK_HZ * span_s, span_s, CLOCK_HZ, CLOCK_HZ),
                CLOCK_RATIO: Gauge(CLOCK_SHARE * span_s, span_s, CLOCK_SHARE, CLOCK_SHARE),
                "temperature_c": Gauge(TEMPERATURE_C * span_s, span_s, TEMPERATURE_C, TEMPERATURE_C),
                "power_limit_w": Gauge(LIMIT_W * span_s, span_s, LIMIT_W, LIMIT_W),
            },
            power_histogram_s={int(power_w / 10): span_s},
        )
        counts: dict[str, Any] = {"tokens": tokens, "tokens_processed": tokens, "samples": self._log_interval}
        return RankReport(
            agent=self.agent,
            sequence=self._window,
            rank=self.rank,
            window=self._window,
            iteration_first=last - self._log_interval + 1,
            iteration_last=last,
            iteration_shown=last,
            start_time_s=start_s + unix_minus_monotonic_s,
            end_time_s=end_s + unix_minus_monotonic_s,
            wall_s=span_s,
            busy_s=STEP_SHARE * span_s,
            wait_s=span_s - STEP_SHARE * span_s,
            phases_s={},
            devices=(device,),
            allocator=Allocator(*(size + self.rank for size in ALLOCATOR_BYTES)),
            **counts,
        )

    def tokens_of_first(self, num_reports: int) -> int:
        """Return the tokens of the first reports; all reports have the same number."""
        return num_reports * self._log_interval * (TOKENS + self.rank)

    def bye(self, lost: int) -> Bye:
        return Bye(self.agent, self.rank, "completed", self._window * self._log_interval, lost)


class _SimulatedPeer:
    """One rank with its connection and its unacknowledged reports."""

    def __init__(self, part: Part, rank: int, context: zmq.Context[zmq.Socket[bytes]], keys: AgentKeys | None) -> None:
        self.rank = SimulatedRank(rank, part.world_size, part.job, uuid.uuid4().hex[:16], part.log_interval)
        self.link = Link(context, part.endpoint, keys, is_monitored=False)
        self.outbox = Outbox(MAX_UNCONFIRMED)
        self.hello_sent_s = self.last_sent_s = 0.0  # monotonic times of the HELLO, and of the last report or heartbeat
        self.is_welcome = self.bye_sent = self.bye_seen = False  # bye_seen: the aggregator has confirmed the BYE
        self.rejected = ""  # the reason
        self.seen_iteration = 0  # iteration of the newest received values
        self.bye_seen_s = 0.0  # monotonic time
        self._confirmed = 0  # sequence number of the newest confirmed report

    def handle_messages(self) -> None:
        for message in self.link.receive():
            if isinstance(message, Ack):
                self.outbox.drop_acknowledged(message.sequence)
                self._confirmed = max(self._confirmed, message.sequence)
                self.seen_iteration = message.iteration
            elif isinstance(message, Welcome):
                self._handle_welcome(again=message.again)
            elif isinstance(message, ByeSeen):
                self.bye_seen, self.bye_seen_s = True, time.monotonic()
            elif isinstance(message, Rejected):
                self.rejected = message.reason

    def _handle_welcome(self, again: bool) -> None:
        """Mark all reports to be sent, after the first WELCOME, or ``again`` for an aggregator that was restarted."""
        if again or not self.is_welcome:
            self.outbox.mark_all_unsent()
        if again:
            self.bye_sent = False
            self.link.send(self.rank.hello())
        self.is_welcome = True

    def send_hello_if_due(self, now_s: float) -> None:
        """Send a HELLO, if no WELCOME was received and the last HELLO is old."""
        if not self.is_welcome and now_s - self.hello_sent_s > HELLO_AGAIN_S and self.link.send(self.rank.hello()):
            self.hello_sent_s = now_s

    @property
    def tokens_confirmed(self) -> int:
        """Tokens of the confirmed reports; the confirmation of the BYE covers all reports before it."""
        return self.rank.tokens if self.bye_seen else self.rank.tokens_of_first(self._confirmed)

    def send_reports(self) -> int:
        """Send the reports that were not sent; return their number."""
        if count := self.link.send_reports(self.outbox):
            self.last_sent_s = time.monotonic()  # reports also count as heartbeats
        return count

    def is_over(self, now_s: float) -> bool:
        """Whether the BYE is confirmed, and either all reports are confirmed or `CONFIRM_WITHIN_S` has passed."""
        return self.bye_seen and (not len(self.outbox) or now_s - self.bye_seen_s > CONFIRM_WITHIN_S)

    def send_heartbeat_if_due(self, now_s: float, ordinal: int) -> None:
        """Send a heartbeat if the last heartbeat or report is older than `HEARTBEAT_S`."""
        if now_s - self.last_sent_s >= HEARTBEAT_S:
            self.last_sent_s = now_s
            rank, num_lost = self.rank, self.outbox.num_lost
            self.link.send(Heartbeat(rank.agent, rank.rank, ordinal, "in an iteration", 0.0, num_lost))


class SimulatedRanks:
    """The ranks of this process, in one thread."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._context = make_context()
        self._context.set(zmq.MAX_SOCKETS, part.num_ranks + 16)
        keys = AgentKeys.from_secret(secret.read(Path(part.secret_file)), part.salt) if part.secret_file else None
        self._peers = [_SimulatedPeer(part, part.first_rank + i, self._context, keys) for i in range(part.num_ranks)]
        self._unix_minus_monotonic_s = time.time() - time.monotonic()
        self._num_sent = 0  # reports
        self._seen_iteration = 0  # of the newest values that rank 0 has received

    def run(self) -> None:
        """Connect all ranks, wait for the start time, report every window, and leave the job."""
        self._join_all()
        first_start_s = self._wait_for_start_time()
        for peer in self._peers:  # the heartbeats of the ranks are spread over the period, at 97 times
            peer.last_sent_s = first_start_s + HEARTBEAT_S * (peer.rank.rank % 97) / 97 - HEARTBEAT_S
        self._report_windows(first_start_s)
        self._leave_job()
        self._context.destroy(linger=500)

    def _write(self, progress: Progress) -> None:
        os.write(self._part.output_descriptor, msgspec.json.encode(progress) + b"\n")

    def _join_all(self) -> None:
        """Connect all ranks, `MAX_JOINING` at a time, until each has a WELCOME."""
        waiting: list[_SimulatedPeer] = []
        unconnected = list(reversed(self._peers))
        while waiting or unconnected:
            while unconnected and len(waiting) < MAX_JOINING:
                waiting.append(unconnected.pop())
                waiting[-1].link.connect()
            now_s = time.monotonic()
            for peer in waiting:
                peer.handle_messages()
                if peer.rejected:
                    self._write(Progress(rejected=peer.rejected))
                    raise SystemExit(1)
                peer.send_hello_if_due(now_s)
            num_before, waiting = len(waiting), [peer for peer in waiting if not peer.is_welcome]
            if len(waiting) != num_before:
                self._write(Progress(joined=self._part.num_ranks - len(waiting) - len(unconnected)))
            time.sleep(0.02)
            self._exit_if_command_ended()

    def _wait_for_start_time(self) -> float:
        """Keep the connections alive until the command has written the start time of the first window; return it."""
        while not select.select([self._part.input_descriptor], [], [], 1.0)[0]:
            for peer in self._peers:
                peer.handle_messages()
                peer.send_heartbeat_if_due(time.monotonic(), 0)
        return float(os.read(self._part.input_descriptor, 100))

    def _report_windows(self, first_start_s: float) -> None:
        part = self._part
        # The windows of a rank begin and end this much later than those of rank 0.
        lags_s = {peer.rank.rank: part.spread_s * peer.rank.rank / part.world_size for peer in self._peers}
        for window in range(1, part.windows + 1):
            start_s = first_start_s + (window - 1) * part.interval_s
            for number, peer in enumerate(self._peers):
                lag_s = lags_s[peer.rank.rank]
                end_s = start_s + part.interval_s + lag_s
                self._wait_until(end_s)
                now_s = time.monotonic()
                peer.handle_messages()
                report = peer.rank.next_report(start_s + lag_s, end_s, self._unix_minus_monotonic_s)
                peer.outbox.add_report(report)
                self._num_sent += peer.send_reports()
                peer.send_heartbeat_if_due(now_s, window * part.log_interval)
                if number % CHECK_EVERY == 0:
                    self._write_seen_window()
            self._write(Progress(sent=self._num_sent, window=window, at_s=time.monotonic()))

    def _wait_until(self, until_s: float) -> None:
        while (wait_s := until_s - time.monotonic()) > 0:
            self._write_seen_window()
            time.sleep(min(wait_s, IDLE_S))

    def _write_seen_window(self) -> None:
        """Write a line if rank 0, which this process may have, has received the values of a new window."""
        first = self._peers[0]
        if first.rank.rank != 0:
            return
        first.handle_messages()
        if first.seen_iteration > self._seen_iteration:
            self._seen_iteration = first.seen_iteration
            self._write(Progress(seen_window=self._seen_iteration // self._part.log_interval, at_s=time.monotonic()))

    def _leave_job(self) -> None:
        """Send the last reports and the BYE of each rank, wait for their confirmation, and write the sums."""
        deadline_s = time.monotonic() + LEAVE_WITHIN_S
        waiting = list(self._peers)
        while waiting and time.monotonic() < deadline_s:
            for number, peer in enumerate(waiting):
                peer.handle_messages()
                self._num_sent += peer.send_reports()
                peer.send_heartbeat_if_due(time.monotonic(), self._part.windows * self._part.log_interval)
                if not peer.bye_sent and not peer.outbox.next_unsent():
                    peer.bye_sent = peer.link.send(peer.rank.bye(peer.outbox.num_lost))
                if number % CHECK_EVERY == 0:
                    self._write_seen_window()
            waiting = [peer for peer in waiting if not peer.is_over(time.monotonic())]
            time.sleep(0.02)
        ranks = [peer.rank for peer in self._peers]
        done = Progress(
            sent=self._num_sent,
            done=True,
            tokens=sum(rank.tokens for rank in ranks),
            tokens_confirmed=sum(peer.tokens_confirmed for peer in self._peers),
            energy_j=sum(rank.energy_j for rank in ranks),
            lost=sum(peer.outbox.num_lost for peer in self._peers),
            unconfirmed=sum(len(peer.outbox) for peer in self._peers if not peer.bye_seen),
        )
        self._write(done)

    def _exit_if_command_ended(self) -> None:
        poll = select.poll()
        poll.register(self._part.input_descriptor, 0)
        if poll.poll(0):  # the pipe is closed, because the command has ended
            raise SystemExit(1)


def main(arguments: list[str]) -> None:
    """Simulate the ranks of a `Part`, which is in ``arguments[0]`` as JSON."""
    raise_open_files_limit()
    SimulatedRanks(msgspec.json.decode(arguments[0], type=Part)).run()
