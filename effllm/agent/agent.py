"""The agent's process; each rank has one.

An agent is started with exec, never only with fork, in its own session. The agent watches its trainer with a pidfd.
When the trainer has ended, the agent drains the ring, sends the remaining reports and a BYE, and exits within 5 s, or
30 s if the aggregator has not answered yet or still acknowledges reports.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import zmq

from effllm.agent.children import Children
from effllm.agent.conversation import Connection, Conversation
from effllm.agent.events import AgentEvents, Notices, silence_stderr, write_notice
from effllm.agent.measuring import Measuring
from effllm.agent.rank_devices import RankDevices
from effllm.agent.trainer import Trainer
from effllm.config.spawn import NO_RESOURCES, is_out_of_resources
from effllm.network import discovery
from effllm.network.listening import raise_open_files_limit
from effllm.records.board import Board
from effllm.records.plain_text import one_line
from effllm.records.ring import RingReader

SEND_REMAINING_S = 4.0
MAX_SEND_REMAINING_S = 30.0  # the same limit for an aggregator that has not answered yet, or still acknowledges reports
AGGREGATOR_ENDS_S = 4.7
END_SAMPLES_S = 0.5  # maximum wait for the last samples and the last recording
WITHOUT_WAKES_S = 0.1  # the ring is read this often if the script has closed the socket
MIN_LOOP_S = 0.05  # iterations of a millisecond must not wake the agent a thousand times a second


class Agent:
    """The loop of an agent: reads the ring and the devices, and sends reports; the trainer writes to ``wake``."""

    def __init__(self, trainer: Trainer, events: AgentEvents, wake: socket.socket) -> None:
        self._trainer, self._events, self._wake = trainer, events, wake
        self._poller = zmq.Poller()
        self._notices = Notices(trainer, events)
        self._children = Children(trainer, self._poller, events, self._notices)
        self._connection = Connection(trainer, self._poller, self._notices)
        self._devices = RankDevices(trainer, events.add_event)
        self._can_be_woken = False  # whether `wake` is in the poller: not before `run`, nor after the socket is closed
        self._was_just_woken = self._is_trainer_replaced = False  # by `wake` in the last poll; by another program
        self.is_measuring = False

    def run(self) -> None:
        """Run until shortly after the trainer's end; write to the socket when measuring has begun."""
        if self._trainer.descriptor >= 0:
            self._poller.register(self._trainer.descriptor, zmq.POLLIN)
        self._poller.register(self._devices.wake_descriptor, zmq.POLLIN)
        self._children.start_aggregator()
        self._connection.connect_to_newest()
        self._devices.start_samplers()
        self._measuring = Measuring(self._trainer, self._devices)
        self.is_measuring = True
        with contextlib.suppress(OSError):  # the trainer has ended
            self._wake.send(b"\1")
        for text in self._trainer.facts.warnings:  # later warnings arrive with changed facts
            self._events.report("warning", text)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        self._can_be_woken = True
        self._conversation = Conversation(
            self._trainer, self._measuring, self._connection, self._children, self._events, self._notices
        )
        while self._measuring.status is None:
            self._poll_and_handle()
        self._shut_down()

    def _poll_and_handle(self) -> None:
        """Wait until something arrives or is due, and handle it."""
        events = dict(self._poller.poll(self._timeout_ms()))
        began_s = time.monotonic()
        link = self._connection.link
        if link is not None and events.keys() == {link.socket}:  # only messages: a later call does the periodic work
            self._conversation.exchange_messages(began_s)
        else:
            is_gone = self._trainer.descriptor in events or self._trainer.is_gone() or self._is_trainer_replaced
            self._do_periodic_work(is_gone)
        if self._wake.fileno() in events:
            # The records of shorter iterations are read several at a time.
            pause_s = MIN_LOOP_S - (time.monotonic() - began_s)
            if self._was_just_woken and pause_s > 0:
                time.sleep(pause_s)
        self._was_just_woken = self._wake.fileno() in events

    def _timeout_ms(self) -> int:
        now_s = time.monotonic()
        until_s = min(self._conversation.due_s(now_s), self._measuring.due_s(now_s), self._children.due_s)
        if self._trainer.descriptor < 0:
            until_s = min(until_s, now_s + 1.0)  # without a pidfd, the end of the trainer does not end the poll
        if not self._can_be_woken:
            until_s = min(until_s, now_s + WITHOUT_WAKES_S)
        return max(int((until_s - now_s) * 1000) + 1, 0)  # rounded up: the poll does not end before `until_s`

    def _do_periodic_work(self, is_gone: bool = False) -> None:
        now_s = time.monotonic()
        self._drain_wakes()
        self._measuring.read_ring_and_samples(is_trainer_gone=is_gone)
        self._take_address_and_facts()  # after the records: then all their values have a name in the facts
        if text := self._measuring.values.take_notice():
            self._events.report("warning", text)
        for event in self._measuring.memory.take_events(time.time()):
            self._events.add_event(event)
        self._measuring.cut_ended_windows(now_s)
        self._children.supervise(now_s, self._measuring.cutter.last_ordinal, self._measuring.cutter.iterations_ns)
        self._conversation.exchange_messages(now_s)
        self._measuring.compact_samples(now_s)

    def _drain_wakes(self) -> None:
        """Read what has woken the agent; a closed socket means that the trainer has ended or was replaced."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._devices.wake_descriptor)
        if not self._can_be_woken:
            return
        try:
            is_open = bool(self._wake.recv(4096))
        except BlockingIOError:
            is_open = True
        except OSError:
            is_open = False
        if not is_open:  # the trainer has ended, or runs another program, or has closed all descriptors
            self._stop_waking()
            self._is_trainer_replaced = self._trainer.exit_status.runs_other_program()

    def _stop_waking(self) -> None:
        if self._can_be_woken:
            self._can_be_woken = False
            self._poller.unregister(self._wake.fileno())

    def _take_address_and_facts(self) -> None:
        address = self._trainer.take_address()
        if address.failed:
            self._notices.report_no_metrics(address.failed)
        elif address.refused:
            self._notices.is_explained = True  # the trainer of rank 0 has already printed the reason
            self._events.report("agent", f"rank 0 has no aggregator: {one_line(address.refused)}")
        if (warnings := self._trainer.take_facts()) is not None:
            for text in warnings:
                self._events.report("warning", text)
            self._devices.open_other_gpus()
            self._conversation.has_new_facts = True
        self._conversation.connect_to_newest()

    def _shut_down(self) -> None:
        """Make and send the last reports and a BYE, wait for their acknowledgement, and close everything.

        The wait is `SEND_REMAINING_S`, but `MAX_SEND_REMAINING_S` for an aggregator that has not answered yet (it may
        be starting, for example from a slow file system) or that still acknowledges thousands of reports.
        """
        began_s = time.monotonic()
        if self._trainer.descriptor >= 0:
            self._poller.unregister(self._trainer.descriptor)
        self._stop_waking()
        self._children.recording.finish()
        recording = self._children.recording
        while time.monotonic() - began_s < END_SAMPLES_S and not (self._measuring.settle_end() and recording.is_idle):
            self._poller.poll(20)
            self._children.supervise(time.monotonic(), ordinal=0, iterations_ns=self._measuring.cutter.iterations_ns)
        self._measuring.finish()
        self._events.add_omitted_counts()
        self._send_remaining(began_s + SEND_REMAINING_S)
        if self._conversation.may_deliver:
            if self._conversation.is_unanswered:
                self._notices.report_wait(MAX_SEND_REMAINING_S)
            silence_stderr()
            self._send_remaining(began_s + MAX_SEND_REMAINING_S, is_extended=True)
        self._conversation.report_undelivered()
        aggregator, until_s = self._children.aggregator, began_s + AGGREGATOR_ENDS_S
        while aggregator is not None and not aggregator.done and time.monotonic() < until_s:
            self._poller.poll(20)
            self._do_periodic_work()
        recording.stop()
        self._devices.stop()
        self._events.log.close()
        if path := self._trainer.facts.address_file:
            discovery.remove_record(Path(path), self._trainer.facts.job)
        self._connection.close()

    def _send_remaining(self, until_s: float, is_extended: bool = False) -> None:
        """Send reports and a BYE until these are acknowledged; ``is_extended``: only while an aggregator may do so."""
        while time.monotonic() < until_s and not self._conversation.refused:
            if is_extended and not self._conversation.may_deliver:
                break
            self._do_periodic_work()
            self._conversation.send_bye()
            if self._conversation.is_over(time.monotonic()):
                break
            self._poller.poll(50)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="effllm.agent.agent")
    for name in ("ring", "board", "trainer", "wake"):  # numbers of inherited descriptors
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a signal to the job must not end the agent before its trainer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)
    raise_open_files_limit()  # two files stay open for each process of a job without a GPU
    events: AgentEvents | None = None
    agent: Agent | None = None
    try:
        trainer = Trainer(RingReader(given.ring), Board(given.board), given.trainer)
        events = AgentEvents(trainer.rank)
        wake = socket.socket(fileno=given.wake)
        wake.setblocking(False)
        agent = Agent(trainer, events, wake)
        agent.run()
    except Exception as error:  # noqa: BLE001 - the edge of the process: one line reports the error
        if is_out_of_resources(error) and not (agent is not None and agent.is_measuring):
            os._exit(NO_RESOURCES)  # the trainer prints the reason
        why = f"{type(error).__name__}: {error}"
        write_notice(f"an agent has stopped, and its rank has no metrics from now on: {why}")
        if events:
            events.report("agent", "".join(traceback.format_exception(error)).rstrip())
            events.log.close()
        os._exit(1)
    os._exit(0)  # a thread in a hanging device call cannot be joined


if __name__ == "__main__":
    main(sys.argv[1:])
