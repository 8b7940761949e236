"""The messages between an agent and the aggregator: HELLO, heartbeats, reports, events, BYE, and their replies."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import zmq

from effllm.agent.children import Children
from effllm.agent.events import AgentEvents, Notices, silence_stderr, write_notice
from effllm.agent.measuring import Measuring
from effllm.agent.proc import ENDED, CoreWait, process_state
from effllm.agent.trainer import Trainer
from effllm.config.place import stated_gpus
from effllm.config.settings import secret_path
from effllm.config.switches import process_environ
from effllm.job.health.hang import BEATS, WAITING
from effllm.network import secret
from effllm.network.curve import AgentKeys
from effllm.network.transport import Link, make_context
from effllm.records import wire
from effllm.records.board import JobState
from effllm.records.facts import RankFacts, to_document
from effllm.records.identity import read_submission
from effllm.records.rank import MARKED_PHASES, MAX_TEXT, ParameterCount
from effllm.records.ring import BETWEEN, PHASE_STATE, STARTUP, STATE_NAMES

HEARTBEAT_S = 5.0
HELLO_AGAIN_S = 2.0
REPORT_EVERY_S = 0.25  # time between two frames; a frame can have 256 reports, enough for windows of a millisecond
SEND_AGAIN_S = 0.1
ACKNOWLEDGES_WITHIN_S = 2.0  # an aggregator that acknowledges nothing for longer is not waited for
RANKS_PER_SECOND = 500  # the same in a large world: with ten thousand ranks an aggregator acknowledges every 10 s
REPLACED_WITHIN_S = 1.5  # maximum time until a dead aggregator is replaced; without a replacement, the job is over


class Connection:
    """A link to the newest address of the aggregator; ``poller`` wakes the agent when a message arrives."""

    def __init__(self, trainer: Trainer, poller: zmq.Poller, notices: Notices) -> None:
        self._trainer, self._poller, self._notices = trainer, poller, notices
        self._context = make_context()
        self.link: Link | None = None
        self.endpoint, self._job = "", ""  # of the newest address, also if no link could be opened

    def connect_to_newest(self) -> bool:
        """Connect to the newest address; return whether an earlier link was closed."""
        endpoint, job = self._trainer.facts.endpoint, self._trainer.facts.job
        if not endpoint or (endpoint, job) == (self.endpoint, self._job):
            return False
        self.endpoint, self._job = endpoint, job
        was_linked = self.disconnect()
        keys: AgentKeys | None = None
        if self._trainer.facts.secured:
            try:
                keys = AgentKeys.from_secret(secret.read(secret_path(self._trainer.config)), job)
            except secret.SecretError as error:
                self._notices.report_no_metrics(f"no metrics of this rank: {error}")
                return was_linked
        self.link = Link(self._context, endpoint, keys)
        self.link.connect()
        self._poller.register(self.link.socket, zmq.POLLIN)
        self._poller.register(self.link.monitor, zmq.POLLIN)
        return was_linked

    def disconnect(self) -> bool:
        """Close the link; return whether a link was open."""
        if self.link is None:
            return False
        self._poller.unregister(self.link.socket)
        self._poller.unregister(self.link.monitor)
        self.link.close()
        self.link = None
        return True

    def close(self) -> None:
        """Close the link and the context; wait at most 0.2 s for unsent messages."""
        self.disconnect()
        self._context.destroy(linger=200)


class Conversation:
    """Sends messages when they are due, and handles received messages."""

    def __init__(
        self,
        trainer: Trainer,
        measuring: Measuring,
        connection: Connection,
        children: Children,
        events: AgentEvents,
        notices: Notices,
    ) -> None:
        self._trainer, self._measuring, self._connection = trainer, measuring, connection
        self._children, self._events, self._notices = children, events, notices
        self._outbox = measuring.outbox
        self._core_wait: CoreWait | None = None  # since the first iterations: the start of a process waits, too
        self._welcome: wire.Welcome | None = None  # the answer to the HELLO on the present connection
        self._was_ever_welcome = False  # whether any aggregator has answered so far
        self.refused = ""  # the aggregator's reason for the rejection of this rank
        self._is_put_off = False  # this aggregator is ending; the agent waits for another address
        self.has_new_facts = False  # whether facts or devices have changed since the last HELLO
        self._bye_sent = self._bye_seen = False  # whether this aggregator was sent the BYE, and has acknowledged it
        self._heartbeat_s = min(HEARTBEAT_S, trainer.config.stall_seconds / BEATS)
        self._hello_sent_s = self._next_heartbeat_s = self._next_frame_s = 0.0
        self._acknowledged_s = 0.0  # time of the last acknowledgement, or of the answer to a HELLO
        self._last_connected_s = 0.0  # at the end of the job: last time at which the link was connected

    def connect_to_newest(self) -> None:
        if self._connection.connect_to_newest():
            self._forget_answers()

    def exchange_messages(self, now_s: float) -> None:
        """Introduce the rank on a new connection, handle the received messages, and send what is due."""
        self.has_new_facts = self._measuring.devices.take_has_changed() or self.has_new_facts
        if self._core_wait is None and self._measuring.cutter.last_ordinal:
            self._core_wait = CoreWait(self._trainer.pid)
        link = self._connection.link
        if link is None:
            self._warn_without_aggregator(now_s)
            return
        has_answer = self._welcome or self.refused or self._is_put_off
        if link.has_new_connection():
            self._welcome = None
            self._outbox.mark_all_unsent()
            self._bye_sent = self._bye_seen = False
            self._send_hello(now_s)
        elif link.connected and not has_answer and now_s - self._hello_sent_s > HELLO_AGAIN_S:
            self._send_hello(now_s)
        for message in link.receive():
            self._handle_message(message)
        if self._welcome is None:
            self._warn_without_aggregator(now_s)
            return
        if self.has_new_facts:
            self._send_hello(now_s)
        self._send_reports(link, now_s)
        self._send_events_and_stacks(link)
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + self._heartbeat_s
            link.send(heartbeat(self._trainer, self._measuring, now_s))

    def due_s(self, now_s: float) -> float:
        """Return the time of the next call of `exchange_messages`, at the latest."""
        until_s = now_s + 1.0
        if self._welcome:
            until_s = self._next_heartbeat_s
            if self._outbox.num_unsent:
                until_s = min(until_s, max(self._next_frame_s, now_s))
        elif self._connection.link is not None and self._connection.link.connected:
            until_s = min(until_s, self._hello_sent_s + HELLO_AGAIN_S)
        return until_s

    def send_bye(self) -> None:
        """Send one BYE, after every report has been sent."""
        link = self._connection.link
        if link is None or not self._welcome or self._outbox.num_unsent or self._bye_sent:
            return
        agent, rank, status = self._trainer.agent, self._trainer.rank, self._measuring.status or ENDED
        num_lost, last_ordinal = self._outbox.num_lost, self._measuring.cutter.last_ordinal
        end_time_s = self._measuring.cutter.unix_s(self._measuring.end_ns)
        bye = wire.Bye(agent, rank, status, last_ordinal, num_lost, *self._cost(), end_time_s, self._core_wait_s())
        self._bye_sent = link.send(bye)

    def is_over(self, now_s: float) -> bool:
        """Whether the agent need not wait: all reports and the BYE were received, or no aggregator will answer.

        The aggregator's last messages may be lost: with ZMQ_IMMEDIATE a link drops unread messages when it is closed.
        """
        if self._children.is_aggregator_done:
            return True
        if self._connection.link is not None and self._connection.link.connected:
            self._last_connected_s = now_s
        may_come_back = self._children.aggregator is not None or now_s - self._last_connected_s < REPLACED_WITHIN_S
        return self._bye_seen and not (len(self._outbox) and may_come_back)

    @property
    def is_unanswered(self) -> bool:
        """Whether no aggregator has answered yet, and one may still do so."""
        has_address = self._connection.link is not None
        return has_address and not (self._was_ever_welcome or self.refused or self._children.is_aggregator_done)

    @property
    def may_deliver(self) -> bool:
        """Whether an aggregator may still answer for the first time, or is acknowledging reports."""
        limit_s = max(ACKNOWLEDGES_WITHIN_S, self._trainer.place.world_size / RANKS_PER_SECOND)
        is_answering = time.monotonic() - self._acknowledged_s < limit_s
        return self.is_unanswered or (is_answering and not self._bye_seen)

    def report_undelivered(self) -> None:
        if len(self._outbox) and not self._bye_seen and not self.refused:
            self._notices.report_undelivered(len(self._outbox))

    def _warn_without_aggregator(self, now_s: float) -> None:
        if not self.refused:
            self._notices.report_no_aggregator(now_s)

    def _send_hello(self, now_s: float) -> None:
        self._hello_sent_s = now_s
        if self._connection.link:
            self.has_new_facts = not self._connection.link.send(hello(self._trainer, self._measuring))

    def _send_reports(self, link: Link, now_s: float) -> None:
        if not self._outbox.num_unsent or (now_s < self._next_frame_s and self._measuring.status is None):
            return
        if link.send_reports(self._outbox, *self._cost(), self._core_wait_s()):
            self._next_frame_s = now_s + max(REPORT_EVERY_S, self._welcome.report_every_s if self._welcome else 0.0)
            self._next_heartbeat_s = now_s + self._heartbeat_s  # a report also shows that the agent is alive
        if self._outbox.num_unsent:
            self._next_frame_s = now_s + SEND_AGAIN_S

    def _send_events_and_stacks(self, link: Link) -> None:
        agent, rank = self._trainer.agent, self._trainer.rank
        while (event := self._events.oldest_unsent()) is not None:
            if not link.send(wire.AgentEvent(agent, rank, event)):
                break
            self._events.remove_oldest()
        if (result := self._children.inspection_result) is not None:
            ordinal = self._trainer.ring.read_state().ordinal
            if link.send(wire.Stack(agent, rank, ordinal, result.text, result.top[:MAX_TEXT])):
                self._children.inspection_result = None
        samples = self._children.host_samples
        while samples and link.send(samples[0]):
            del samples[0]

    def _core_wait_s(self) -> float | None:
        return self._core_wait.seconds() if self._core_wait is not None else None

    def _cost(self) -> tuple[float, int, float | None]:
        """Return the cost of the measurement: CPU seconds of the agent, sent bytes, seconds of the recorder."""
        pair_s, link = self._trainer.facts.recorder_pair_s, self._connection.link
        sent_bytes = link.sent_bytes if link is not None else 0
        recorder_s = None if pair_s is None else pair_s * self._measuring.cutter.last_ordinal
        return time.process_time(), sent_bytes, recorder_s

    def _handle_message(self, message: wire.FromAggregator) -> None:
        if isinstance(message, wire.Welcome):
            self._accept_welcome(message)
        elif isinstance(message, wire.Ack):
            before = len(self._outbox)
            self._outbox.drop_acknowledged(message.sequence)
            if len(self._outbox) < before:  # not a repeated acknowledgement, which only tests the connection
                self._acknowledged_s = time.monotonic()
            if message.report:
                state = JobState(message.report, message.iteration, message.values, self._connection.endpoint)
                self._trainer.board.write_state(state)
        elif isinstance(message, wire.Rejected):
            self._accept_rejection(message)
        elif isinstance(message, wire.ByeSeen):
            self._bye_seen = True
        elif isinstance(message, wire.RecordStacks):
            self._children.recording.request_soon(time.monotonic())
        else:  # wire.Inspect
            self._children.inspect(self._welcome.run_folder if self._welcome else "")

    def _accept_welcome(self, welcome: wire.Welcome) -> None:
        self._welcome, self._was_ever_welcome = welcome, True
        self._acknowledged_s = time.monotonic()
        if self._children.aggregator is not None:
            self._children.aggregator.has_served = True
        board, endpoint = self._trainer.board, self._connection.endpoint
        if board.admitted_by() != endpoint:  # the trainer's address search waits for the endpoint
            board.write_state(replace(board.read_state(), admitted_by=endpoint))
        if welcome.again:
            self._outbox.mark_all_unsent()
            self._bye_sent = False
            self._send_hello(time.monotonic())
        if welcome.run_folder and Path(welcome.run_folder).is_dir():
            self._events.log.start_writing(Path(welcome.run_folder) / "logs")
        silence_stderr()

    def _accept_rejection(self, message: wire.Rejected) -> None:
        if message.again:
            self._is_put_off = True  # this aggregator is ending; its replacement has another address
            return
        if message.reason == self.refused and not message.whole_job:
            return  # already reported
        if message.whole_job and self._connection.disconnect():  # another peer may then use the connection
            self._forget_answers()
        self.refused = message.reason
        self._events.report("agent", f"rejected: {message.reason}")
        if not message.whole_job:
            write_notice(f"rank {self._trainer.rank} is left out of the metrics: {message.reason}")
        elif self._trainer.rank == 0:
            write_notice(f"no metrics, training goes on: {message.reason}")

    def _forget_answers(self) -> None:
        self._welcome = None
        self.refused = ""
        self._is_put_off = self._bye_sent = self._bye_seen = False
        self._outbox.mark_all_unsent()


def hello(trainer: Trainer, measuring: Measuring) -> wire.Hello:
    """Return the message that introduces a rank; only rank 0 states the facts of the run."""
    facts = trainer.facts
    run_facts = facts if trainer.rank == 0 else RankFacts()
    environ = process_environ()  # the agent has the environment of its trainer
    num_gpus, source = stated_gpus(environ) if measuring.devices.has_all_gpus else (0, "")
    visible_devices = facts.visible_devices
    num_visible = facts.visible_gpus or (0 if visible_devices is None else len(visible_devices.split(",")))
    return wire.Hello(
        job=facts.job,
        agent=trainer.agent,
        rank=trainer.rank,
        local_rank=trainer.place.local_rank,
        world_size=trainer.place.world_size,
        host=facts.host,
        role=trainer.config.role,
        devices=tuple(series.device for series in measuring.devices.series),
        parameters=ParameterCount(**to_document(facts.parameters)),
        log_interval=trainer.config.log_interval,
        trainer_pid=trainer.pid,
        offset=facts.first_iteration,
        total_iterations=facts.total_iterations,
        flops_per_token=facts.flops_per_token,
        facts=dict(run_facts.run),
        hardware_flops_per_token=facts.hardware_flops_per_token,
        is_numbered=facts.is_numbered,
        peer_group=facts.peer_group,
        replica=facts.replica,
        time_s=measuring.time_s(),
        start_time_s=measuring.cutter.unix_s(measuring.cutter.origin_ns),
        style=run_facts.style,
        evaluation_in_iterations=run_facts.evaluation_in_iterations,
        iterations_not_measured=run_facts.iterations_not_measured,
        submission=read_submission(environ, trainer.config.tags) if trainer.rank == 0 else None,
        stated_gpus=num_gpus,
        gpus_source=source,
        # Other ranks may use the rank's GPU, because it sees only this one or MPS shares it.
        shares_gpu=num_visible == 1 or any(name.startswith("CUDA_MPS_") for name in environ),
    )


def heartbeat(trainer: Trainer, measuring: Measuring, now_s: float) -> wire.Heartbeat:
    """Return the state of a rank; ``now_s``: the current monotonic time."""
    state, ordinal, since_ns, phase = trainer.ring.read_state()
    name = MARKED_PHASES[phase] if state == PHASE_STATE else STATE_NAMES[state]
    if state in (STARTUP, BETWEEN) and trainer.facts.serves_requests:
        name = WAITING
    newest = measuring.devices.newest_of_first_device
    return wire.Heartbeat(
        agent=trainer.agent,
        rank=trainer.rank,
        ordinal=ordinal,
        state=name,
        since_s=max(now_s - since_ns * 1e-9, 0.0),
        lost=measuring.outbox.num_lost,
        utilization=newest.utilization if newest else None,
        power_w=newest.power_w if newest else None,
        process=process_state(trainer.pid),
        time_s=measuring.time_s(),
    )
