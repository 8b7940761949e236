"""What an agent runs beside its loop: inspections and recordings of its trainer and, at rank 0, the aggregator."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq

from effllm.agent.events import AgentEvents, Notices
from effllm.agent.inspection import InspectionResult, inspect
from effllm.agent.stack_recording import IterationsNs, StackRecording
from effllm.agent.trainer import Trainer
from effllm.config.spawn import NO_RESOURCES, WHY_NO_RESOURCES, pidfd, spawn
from effllm.records.orders import Orders
from effllm.records.rank import Event
from effllm.records.wire import HostSamples
from effllm.store.run_lock import restart_id_of

INSPECTION_LIMIT_S, CHECK_EVERY_S = 25.0, 0.1
MAX_FAILED_STARTS = 3  # of an aggregator that ends with an error before it has answered this agent
MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.1, 5.0  # the delay doubles with each start


class AggregatorChild:
    """The aggregator process of rank 0's agent; a dead aggregator is replaced, unless it fails at its start.

    ``give_up`` receives the reason when no aggregator can serve.
    """

    def __init__(self, orders: Orders, report: Callable[[Event], None], give_up: Callable[[str], None]) -> None:
        self._orders = orders
        self._report, self._give_up = report, give_up
        self.has_served = False  # whether an aggregator has answered this agent
        self._process: subprocess.Popen[bytes] | None = None
        self._num_started = 0
        self._restart_at_s = 0.0
        self.descriptor = -1  # pidfd of the aggregator; readable after its end
        self.done = False  # no aggregator runs or will be started: the job is over, or none can start

    def start_process(self) -> None:
        """Start an aggregator on the listening socket, which stays open for a replacement; on failure, retry later."""
        orders_file = os.memfd_create("effllm-orders", 0)
        os.write(orders_file, msgspec.json.encode(self._orders))
        orders = self._orders
        descriptors = (orders_file, orders.listen_descriptor, orders.stdout_descriptor, orders.trainer_descriptor)
        try:
            self._process = spawn("effllm.server.process", [str(orders_file)], descriptors)
        except OSError as error:
            self._report(Event(time.time(), "aggregator", f"the aggregator cannot be started: {error}"))
            self._restart_at_s = time.monotonic() + MAX_RESTART_DELAY_S
            return
        finally:
            os.close(orders_file)
        self._num_started += 1
        self.descriptor = pidfd(self._process.pid)

    @property
    def due_s(self) -> float:
        """Time of the next start of an aggregator; infinite while one runs, and if none will be started."""
        return math.inf if self.done or self._process is not None else self._restart_at_s

    def replace_if_dead(self, now_s: float) -> None:
        """Replace a dead aggregator after a growing delay, unless the job is over or no aggregator can start."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
            if code == 0:
                self.done = True
                return
            is_shortage = code in (NO_RESOURCES, -signal.SIGABRT)  # libzmq aborts if it cannot start a thread
            if not self.has_served and (is_shortage or (code > 0 and self._num_started >= MAX_FAILED_STARTS)):
                self.done = True
                why = WHY_NO_RESOURCES if is_shortage else f"it ended with exit status {code}"
                self._give_up(f"no metrics, training goes on: the aggregator cannot start: {why}")
                return
            self._restart_at_s = now_s + min(MIN_RESTART_DELAY_S * 2 ** (self._num_started - 1), MAX_RESTART_DELAY_S)
            text = f"the aggregator died (exit {code}); another aggregator is started"
            self._report(Event(time.time(), "aggregator", text))
        if not self.done and now_s >= self._restart_at_s:
            self.start_process()


class Inspection:
    """Inspects the trainer in a thread, at most once at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._results: list[InspectionResult] = []  # of the newest inspection: at most one
        self._deadline_s = math.inf

    @property
    def due_s(self) -> float:
        return time.monotonic() + CHECK_EVERY_S if self._thread is not None else math.inf

    def start(self, work: Callable[[], InspectionResult], now_s: float) -> str:
        """Start an inspection, unless one is running; return the error of the start, or an empty string."""
        if self._thread is not None:
            return ""
        results = self._results = []  # a late thread has its own list
        thread = threading.Thread(target=lambda: results.append(work()), name="inspection", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no memory, or too many threads
            return f"the inspection cannot be started: {error}"
        self._thread, self._deadline_s = thread, now_s + INSPECTION_LIMIT_S
        return ""

    def take_result(self, now_s: float) -> InspectionResult | None:
        """Return the result once, if the inspection has ended or its deadline has passed, else ``None``."""
        if self._thread is None or (self._thread.is_alive() and now_s < self._deadline_s):
            return None
        why = f"took more than {INSPECTION_LIMIT_S:.0f} s" if self._thread.is_alive() else "failed"
        self._thread = None
        unknown = InspectionResult(f"no stacks: the inspection {why}\n", f"unknown: the inspection {why}")
        return next(iter(self._results), unknown)


class Children:
    """Starts and watches the child processes, without blocking; ``poller`` wakes the agent when a child ends."""

    def __init__(self, trainer: Trainer, poller: zmq.Poller, events: AgentEvents, notices: Notices) -> None:
        self._trainer, self._poller, self._events, self._notices = trainer, poller, events, notices
        self.aggregator: AggregatorChild | None = None  # only of rank 0's agent
        self._inspection = Inspection()
        self.recording = StackRecording(trainer)  # the agent stops it; the aggregator ends when the job is over
        self.host_samples: list[HostSamples] = []  # results of recordings, until they are sent
        self._polled = {"aggregator": -1, "recording": -1}  # descriptors in the poller
        self.inspection_result: InspectionResult | None = None  # result of the inspection, until the result is sent

    def start_aggregator(self) -> None:
        """Start the aggregator, if the trainer has opened the listening socket."""
        facts = self._trainer.facts
        listen = facts.listen_descriptor
        if listen < 0:
            return
        orders = Orders(
            config=self._trainer.config,
            job=facts.job,
            endpoint=facts.endpoint,
            folder=facts.run_folder,
            by_agent=True,
            listen_descriptor=listen,
            stdout_descriptor=facts.stdout_descriptor,
            trainer_descriptor=self._trainer.descriptor,
            facts=dict(facts.run),
            restart_id=restart_id_of(self._trainer.place, facts.host),
            secured=facts.secured,
            salt=facts.job,
        )
        self.aggregator = AggregatorChild(orders, self._events.add_event, self._notices.report_no_metrics)
        self.aggregator.start_process()
        self._set_polled_descriptor("aggregator", self.aggregator.descriptor)

    @property
    def is_aggregator_done(self) -> bool:
        """Whether this agent's aggregator has ended and is not replaced, mostly because the job is over."""
        return self.aggregator is not None and self.aggregator.done

    @property
    def due_s(self) -> float:
        children = (self.aggregator, self._inspection, self.recording)
        return min(child.due_s for child in children if child is not None)

    def supervise(self, now_s: float, ordinal: int, iterations_ns: IterationsNs = tuple) -> None:
        """Replace a dead aggregator, begin a recording if one is due, and keep the results of those that have ended."""
        if self.aggregator:
            self.aggregator.replace_if_dead(now_s)
            self._set_polled_descriptor("aggregator", self.aggregator.descriptor)
        self.inspection_result = self._inspection.take_result(now_s) or self.inspection_result
        if (samples := self.recording.begin_or_end(now_s, ordinal, iterations_ns)) is not None:
            self.host_samples = [*self.host_samples[-1:], samples]  # the newest two
        self._set_polled_descriptor("recording", self.recording.descriptor)

    def inspect(self, run_folder: str) -> None:
        """Start an inspection of the agent's own trainer, after a stall of the job."""
        iteration = self._trainer.ring.read_state().ordinal + self._trainer.facts.first_iteration
        trainer, rank = self._trainer, self._trainer.rank
        copy = Path(run_folder) / "stacks" / f"rank-{rank}-iteration-{iteration}.nccl" if run_folder else None
        work = partial(inspect, trainer.pid, trainer.descriptor, rank, copy)
        if why := self._inspection.start(work, time.monotonic()):
            self.inspection_result = InspectionResult(f"no stacks: {why}\n", f"unknown: {why}")

    def _set_polled_descriptor(self, child: str, descriptor: int) -> None:
        polled = self._polled[child]
        if descriptor == polled:
            return
        if polled >= 0:
            self._poller.unregister(polled)
        if descriptor >= 0:
            self._poller.register(descriptor, zmq.POLLIN)
        self._polled[child] = descriptor
