"""Messages of agents: received at a limited rate, passed to the aggregator, answered; ranks are admitted or rejected.

Reports are acknowledged after a state of the aggregator with these reports was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from effllm.job.aggregator import Aggregator
from effllm.job.closed_windows import Closed
from effllm.job.pacing import Pace, is_large, report_every_s
from effllm.network.listening import num_open_files_needed, raise_open_files_limit
from effllm.network.peers import REJECTED_HELLO, Peers
from effllm.network.transport import FrameError, ServerSocket, decode_from_agent, encode, is_hello
from effllm.records import wire
from effllm.records.board import DOUBTFUL, TRACKED
from effllm.records.clock import Now
from effllm.records.forecast import foretold_values
from effllm.records.job import ClusterReport
from effllm.server.job_end import JobEnd

MAX_FRAMES = 1000  # limit of the frames received in one turn of the loop
MAX_RECEIVE_S = 0.1  # limit of a turn's duration: on a busy machine frames may arrive as fast as they are received
MAX_REJECTED = 32  # after this many consecutive rejected frames, plus one per peer, no valid frame waits
MAX_UNSAVED = 64  # limit of the states that wait for a write

Sequences = dict[int, int]  # rank -> last sequence of its reports in a state


class Messages:
    """Receives and answers the messages of agents; ``warn`` reports an event with a text and a kind."""

    def __init__(
        self,
        socket: ServerSocket,
        peers: Peers,
        aggregator: Aggregator,
        folder: str,
        end: JobEnd,
        on_hello: Callable[[wire.Hello], None],
        warn: Callable[[str, str], None],
    ) -> None:
        self._socket, self._peers, self._aggregator, self._folder = socket, peers, aggregator, folder
        self._end, self._on_hello, self._warn = end, on_hello, warn
        self.is_superseded = False  # whether the aggregator of the next attempt replaces this one
        self._max_ranks = 0  # number of ranks that the limit of open files allows
        self.lacks_descriptors = False  # whether the job was rejected for lack of descriptors
        self.rejected_job = b""  # connection of a rejected job of one rank, which ends the aggregator
        self.is_flooded = False  # True: the last complete read of the socket ended with rejected frames

    def receive(self) -> bool:
        """Receive at most `MAX_FRAMES` messages; return whether all messages of peers below their rate were read."""
        receive, admits, max_rejected = self._socket.receive, self._peers.admit_frame, MAX_REJECTED + len(self._peers)
        num_rejected, until_s = 0, time.monotonic() + MAX_RECEIVE_S
        for _ in range(MAX_FRAMES):
            # The socket reads frames of all peers in turn: after so many rejected frames no other peer has a frame.
            if num_rejected > max_rejected or (received := receive()) is None:
                self.is_flooded = num_rejected > 0
                return True
            peer, frame = received
            now_s = time.monotonic()
            if not admits(peer, len(frame), now_s, is_hello(frame)):  # rejected without decoding
                num_rejected += 1
                self._request_hello(peer, now_s)
                continue
            num_rejected = 0
            try:
                self._handle(peer, decode_from_agent(frame), now_s, len(frame))
            except FrameError as error:
                self._aggregator.reject_frame(time.time(), self._peers.count_undecodable(peer, str(error)))
            if now_s > until_s:
                break
        return False

    def acknowledge(self, sequences: Sequences) -> None:
        """Send to each connected rank the sequence up to which its reports are saved, and the newest values."""
        report = self._aggregator.closed_windows.last_report
        values = published_values(report) if report else {}
        iteration, num_reports = report.iteration if report else 0, self._aggregator.ledger.reports
        frames: dict[int, bytes] = {}  # frames by sequence; ten thousand ranks have few different sequences
        for rank, sequence in sequences.items():
            peer = self._peers.peer_by_rank.get(rank)
            if peer is not None:
                if sequence not in frames:
                    frames[sequence] = encode(wire.Ack(sequence, iteration, values, num_reports))
                self._socket.send_frame(peer, frames[sequence])

    def request_stacks(self) -> None:
        """Request the stacks of stalled ranks, and recordings of the stacks of ranks with a new loss."""
        requests: list[tuple[int, wire.FromAggregator]] = [
            *((rank, wire.Inspect("the job has stalled")) for rank in self._aggregator.stalls.take_ranks_to_ask()),
            *((rank, wire.RecordStacks()) for rank in self._aggregator.closed_windows.take_ranks_to_record()),
        ]
        for rank, request in requests:
            if (peer := self._peers.peer_by_rank.get(rank)) is not None:
                self._socket.send(peer, request)

    def probe(self, rank: int) -> bool:
        """Send an empty acknowledgement to a rank; return whether it could be sent."""
        return (peer := self._peers.peer_by_rank.get(rank)) is not None and self.probe_peer(peer)

    def probe_peer(self, peer: bytes) -> bool:
        return self._socket.send(peer, wire.Ack(0))

    def _request_hello(self, peer: bytes, now_s: float) -> None:
        """Request a new HELLO from a peer whose frames were dropped, when its rate permits."""
        if self._peers.claim_resend_request(peer, now_s):
            self._socket.send(peer, wire.Welcome(self._aggregator.ledger.attempt, self._folder, again=True))

    def _handle(self, peer: bytes, message: wire.FromAgent, now_s: float, num_bytes: int) -> None:
        aggregator, now = self._aggregator, Now(now_s, time.time())
        objection = self._peers.check_sender(peer, message)
        if isinstance(message, wire.Reports) and not objection:  # checked first: ten thousand reports arrive per second
            if not aggregator.reports(message, now, num_bytes):
                self._peers.require_hello(peer)  # the agent will send the rejected reports again
            return
        if isinstance(message, wire.Supersede):
            self.is_superseded = self.is_superseded or self._end.must_end_for(message)
        elif isinstance(message, wire.Hello):
            if (rejection := self._admit(peer, message, objection, now)) is not None:
                self._peers.rejected[REJECTED_HELLO] += 1
                self._socket.send(peer, rejection)
                return
            self._peers.register_hello(peer, message, now_s)
            self._on_hello(message)
            every_s = report_every_s(message.world_size)
            self._socket.send(peer, wire.Welcome(aggregator.ledger.attempt, self._folder, report_every_s=every_s))
        elif objection:
            self._request_hello(peer, now_s)
        elif isinstance(message, wire.Heartbeat):
            aggregator.heartbeat(message, now)
        elif isinstance(message, wire.AgentEvent):
            aggregator.agent_event(message, now)
        elif isinstance(message, wire.HostSamples):
            aggregator.host_samples(message, now)
        elif isinstance(message, wire.Stack):
            aggregator.stack(message, now)
        elif isinstance(message, wire.Bye) and aggregator.bye(message, now):
            self._socket.send(peer, wire.ByeSeen(message.rank))

    def _admit(self, peer: bytes, hello: wire.Hello, objection: str, now: Now) -> wire.Rejected | None:
        """Admit the rank of a HELLO to the job, or return the rejection; ``objection``: why `Peers` rejects it."""
        reason, is_trainer_gone = objection, self._end.has_trainer_ended()
        if not reason and is_trainer_gone and self._aggregator.roster.is_too_late(hello):
            reason = "this attempt is over"
        if not reason and (shortage := self._raise_file_limit(hello, now.mono_s)):
            # A larger job needs this aggregator longer: its other agents would continue to search for one.
            if hello.world_size == 1:
                self.rejected_job = peer
            return wire.Rejected(shortage, whole_job=True)
        reason = reason or self._aggregator.hello(hello, now)
        return wire.Rejected(reason, again=is_trainer_gone) if reason else None

    def _raise_file_limit(self, hello: wire.Hello, now_s: float) -> str:
        """Raise the limit of open files for the world of a valid HELLO; return the reason of a failure."""
        world_size = hello.world_size
        if world_size <= self._max_ranks or self._aggregator.roster.rejection_reason(hello, now_s):
            return ""
        shortage = raise_open_files_limit(num_open_files_needed(world_size))
        if not shortage:
            self._max_ranks = world_size
        elif not self.lacks_descriptors:
            self.lacks_descriptors = True
            self._warn(f"a job of {world_size} ranks is rejected: {shortage}", "descriptors")
        return shortage


def published_values(report: ClusterReport) -> dict[str, float]:
    """Return the values for the training processes: the metrics of the contract (tags without /), and the trackers'."""
    values = {tag: value for tag, value in report.values.items() if "/" not in tag or tag in TRACKED}
    values |= foretold_values(report.forecast, "forecast/")
    return {**values, DOUBTFUL: float(len(report.doubtful))} if report.doubtful else values


class Acknowledgement:
    """Writes windows and states through the store, and acknowledges the reports in a state after it was written.

    This order makes a crash at any moment harmless.  First late reports are added to the sums, because a state cannot
    record that older reports of a rank are missing.  Then the closed windows are written, and after them the state.
    Agents send unacknowledged reports again.  The sequences in the state show which reports the state includes.

    ``history_size`` is the number of unacknowledged reports that an agent can store.  ``save`` writes a state after all
    earlier windows, and then `acknowledge_saved` is called with the given sequences.  It is ``None`` without a store,
    so that reports are acknowledged at once.  ``send`` sends acknowledgements.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        history_size: int,
        write: Callable[[Sequence[Closed]], None],
        save: Callable[[bytes, Sequences], None] | None,
        send: Callable[[Sequences], None],
    ) -> None:
        self._aggregator, self._history_size = aggregator, history_size
        self._write, self._save, self._send = write, save, send
        self._pace = Pace(history_size)
        self._unsaved: list[Sequences] = []  # sequences of states that are queued for writing, oldest first
        self._acknowledged: Sequences = {}  # of the last acknowledgement of all ranks

    def write_windows_and_state(self, now: Now) -> None:
        """Write the windows that have closed since the last call, and then the state if it is due."""
        aggregator = self._aggregator
        closed = aggregator.closed_windows.take_windows()
        self._write_closed(closed)
        # The next acknowledgement will be late, so the newest values are sent before it.
        if closed and (is_large(aggregator.ledger.world_size) or len(self._unsaved) > 1):
            self._send_values()
        del closed  # only after the values were sent: freeing the reports of 10,000 ranks takes 28 ms
        if not self._pace.is_due(now.mono_s, aggregator.ledger.world_size, aggregator.presence.num_left > 0):
            return
        aggregator.add_late_reports(now)
        self._write_closed(aggregator.closed_windows.take_windows())
        self._pace.note_saved(now.mono_s)
        self.save_state()

    def save_state(self) -> None:
        sequences = self._aggregator.open_windows.safe_sequences()
        if self._save is None:
            self._acknowledge(sequences)
            return
        self._unsaved.append(sequences)
        self._acknowledge_if_stalled()
        self._save(self._aggregator.snapshot(sequences), sequences)

    def acknowledge_saved(self, sequences: Sequences) -> None:
        """Acknowledge the reports in a state that was written."""
        for i, unsaved in enumerate(self._unsaved):
            if unsaved is sequences:
                del self._unsaved[: i + 1]  # a later state includes all earlier states
                break
        self._acknowledge(sequences)

    def _write_closed(self, closed: Sequence[Closed]) -> None:
        if closed:
            self._write(closed)
            self._pace.count_closed(len(closed))

    def _acknowledge(self, sequences: Sequences) -> None:
        self._acknowledged = sequences
        self._send(sequences)

    def _send_values(self) -> None:
        """Send the newest values, without a new acknowledgement, to the ranks whose loops show values."""
        ranks = {0, self._aggregator.ledger.world_size - 1}
        self._send({rank: self._acknowledged.get(rank, 0) for rank in ranks})

    def _acknowledge_if_stalled(self) -> None:
        """Acknowledge the reports in unwritten states if an agent's buffer is half full because of a stalled disk."""
        while len(self._unsaved) > 1:
            oldest, newest = self._unsaved[0], self._unsaved[-1]
            num_waiting = max((sequence - oldest.get(rank, 0) for rank, sequence in newest.items()), default=0)
            if num_waiting <= self._history_size // 2:
                break
            self.acknowledge_saved(oldest)
        if len(self._unsaved) > MAX_UNSAVED:
            del self._unsaved[1:-1:2]  # every second one: a later state includes it
