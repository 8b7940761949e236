"""The end of a job in which ranks send no BYE."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from effllm.job.aggregator import Aggregator
from effllm.job.pacing import quiet_s
from effllm.job.presence import LOST_AFTER_S
from effllm.records.orders import Orders
from effllm.records.wire import Supersede

#: At the end of a job, a rank without a connection for this long is lost: an agent reconnects within half a second, and
#: only after repeated failures within five seconds.
GONE_AFTER_S = 2.0
#: With ZMQ_IMMEDIATE an agent's link drops unread messages when the connection ends.  So an aggregator that ended at
#: once would not confirm the BYE of an agent on a busy host.
MAX_DISCONNECT_S, DISCONNECT_POLL_S = 1.0, 0.02


class JobEnd:
    """Decides when a job has ended without BYEs; ``can_send_to`` returns whether a rank's agent is connected."""

    def __init__(self, aggregator: Aggregator, orders: Orders, can_send_to: Callable[[int], bool]) -> None:
        self._aggregator, self._presence = aggregator, aggregator.presence
        self._orders, self._can_send_to = orders, can_send_to
        self._gone_since_s: dict[int, float] = {}  # rank without a connection -> monotonic time of its loss
        self._trainer_ended_s: float | None = None  # monotonic time at which the end was seen
        self._agent_pid = os.getppid() if orders.by_agent else -1  # parent until the agent ends; -1: no agent

    def has_trainer_ended(self) -> bool:
        """Whether rank 0's trainer has ended; ``False`` without a trainer."""
        pidfd = self._orders.trainer_descriptor
        return pidfd >= 0 and bool(select.select([pidfd], [], [], 0)[0])

    def must_end_for(self, message: Supersede) -> bool:
        """Whether the next attempt replaces this aggregator: only if the trainer of this one has ended or is absent."""
        own = self._orders
        is_next_attempt = bool(own.restart_id) and message.restart_id == own.restart_id and message.job != own.job
        return is_next_attempt and (own.trainer_descriptor < 0 or self.has_trainer_ended())

    def mark_disconnected_as_lost(self, now_s: float) -> None:
        """At the end of the job, mark ranks as lost whose agents have had no connection for `GONE_AFTER_S`.

        The kernel closes the connection of a killed agent, so the job need not wait three heartbeat periods for it.
        """
        if self._presence.num_left > 0 or self._trainer_ended_s is not None:  # the job is ending
            quiet_ranks = self._presence.ranks_last_heard(before_s=now_s - quiet_s(self._aggregator.ledger.world_size))
            gone = [rank for rank in quiet_ranks if not self._can_send_to(rank)]
            self._gone_since_s = since_s = {rank: self._gone_since_s.get(rank, now_s) for rank in gone}
            for rank in [rank for rank in gone if now_s - since_s[rank] >= GONE_AFTER_S]:
                self._aggregator.mark_lost(rank, time.time())

    def is_over(self, now_s: float) -> bool:
        """Whether rank 0's trainer ended long ago and all ranks are lost, so that no BYE will arrive.

        On a busy machine a trainer may be killed before its agent sends the first message.  This agent has the records
        of the trainer and started this process, so the aggregator waits while the agent runs.
        """
        if self._trainer_ended_s is None:
            if self.has_trainer_ended():
                self._trainer_ended_s = now_s
            return False
        if self._presence.is_deserted and not self._presence.num_left:
            return True  # all ranks are lost
        has_waited = now_s - self._trainer_ended_s > LOST_AFTER_S or os.getppid() != self._agent_pid
        return has_waited and self._presence.all_lost(now_s)

    def wait_for_disconnections(self, is_rejected_connected: Callable[[], bool]) -> None:
        """Wait until the agents that sent a BYE have disconnected, but not for the agent that started this process.

        The agent of a rejected job disconnects when it has read the reason.
        """
        connected = self._presence.left_ranks - ({0} if self._orders.by_agent else set())
        until_s = time.monotonic() + MAX_DISCONNECT_S
        while time.monotonic() < until_s:
            connected = {rank for rank in connected if self._can_send_to(rank)}
            if not (connected or is_rejected_connected()):
                break
            time.sleep(DISCONNECT_POLL_S)
