"""The child processes of an agent: an inspection of its trainer and, at rank 0, the aggregator."""

from __future__ import annotations

import time

import zmq

from effllm.agent.aggregator_child import AggregatorChild
from effllm.agent.events import AgentEvents
from effllm.agent.inspection import InspectionOrders, InspectionResult
from effllm.agent.inspection_child import InspectionChild
from effllm.agent.trainer import Trainer
from effllm.records.orders import Orders
from effllm.store.run_lock import restart_id_of


class Children:
    """Starts and watches the child processes, without blocking.

    Args:
        trainer: the agent's trainer.
        poller: wakes the agent when a child ends.
        events: receives the children's events.
    """

    def __init__(self, trainer: Trainer, poller: zmq.Poller, events: AgentEvents) -> None:
        self._trainer, self._poller, self._events = trainer, poller, events
        self._aggregator: AggregatorChild | None = None
        self._inspection = InspectionChild()
        self._watched = {"aggregator": -1, "inspection": -1}  # descriptors in the poller
        self.finding: InspectionResult | None = None  # result of the inspection, until the result is sent

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
        self._aggregator = AggregatorChild(orders, self._events.add)
        self._aggregator.start()
        self._watch("aggregator", self._aggregator.descriptor)

    @property
    def has_aggregator(self) -> bool:
        return self._aggregator is not None

    @property
    def is_aggregator_done(self) -> bool:
        """Whether the aggregator has ended because the job is over."""
        return self._aggregator is not None and self._aggregator.done

    @property
    def due_s(self) -> float:
        """Time of the next check of the children."""
        return min(self._aggregator.due_s, self._inspection.due_s) if self._aggregator else self._inspection.due_s

    def look(self, now_s: float) -> None:
        """Replace a dead aggregator, and read the result of a finished inspection."""
        if self._aggregator:
            self._aggregator.look(now_s)
            self._watch("aggregator", self._aggregator.descriptor)
        if (finding := self._inspection.look(now_s)) is not None:
            self._watch("inspection", -1)
            self.finding = finding

    def inspect(self, run_folder: str) -> None:
        """Start an inspection of the agent's own trainer in a separate process, after a stall of the job."""
        number = self._trainer.ring.state()[1] + self._trainer.facts.first_iteration
        orders = InspectionOrders(
            pid=self._trainer.pid,
            rank=self._trainer.rank,
            trainer=self._trainer.descriptor,
            folder=run_folder,
            name=f"rank-{self._trainer.rank}-iteration-{number}",
        )
        if why := self._inspection.start(orders, time.monotonic()):
            self.finding = InspectionResult(f"no stacks: {why}\n", f"unknown: {why}")
        else:
            self._watch("inspection", self._inspection.descriptor)

    def stop_inspection(self) -> None:
        """Stop a running inspection. The aggregator is not stopped, because it ends when the job is over."""
        self._inspection.stop()

    def _watch(self, child: str, descriptor: int) -> None:
        before = self._watched[child]
        if descriptor == before:
            return
        if before >= 0:
            self._poller.unregister(before)
        if descriptor >= 0:
            self._poller.register(descriptor, zmq.POLLIN)
        self._watched[child] = descriptor
