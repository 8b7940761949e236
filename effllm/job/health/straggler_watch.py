"""Passes peers and windows to the detection of stragglers, and records its results in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from effllm.job.health.peers import Peer
from effllm.job.health.stragglers import Stragglers
from effllm.job.iteration_losses import Lost
from effllm.job.iteration_matrix import IterationMatrix
from effllm.job.ledger import Ledger, Waited
from effllm.records.rank import Event, RankReport
from effllm.records.wire import Hello


class StragglerWatch:
    """Judges closed windows, and records the results in the ledger.

    Args:
        ledger: the job's state.
        report: is called with each event.
    """

    def __init__(self, ledger: Ledger, report: Callable[[Event], None]) -> None:
        self._ledger, self._report = ledger, report
        self._stragglers = Stragglers(ledger.stragglers, ledger.last_ranks)

    def hello(self, message: Hello) -> None:
        """Store the peer group of a rank."""
        own = next((device for device in message.devices if not device.only_power), None)
        self._stragglers.meet(
            message.rank,
            Peer(
                group=f"{message.role} {message.peer_group}".rstrip(),
                host=message.host,
                device=own.key if own is not None else "",
                replica=f"{message.role} {message.replica}" if message.replica else "",
                is_gpu=own is not None and own.is_gpu,
            ),
        )

    def close(self, rows: Sequence[RankReport], matrix: IterationMatrix | None, lost: Sequence[Lost]) -> Sequence[Lost]:
        """Judge the next window; return the waits of the ranks for each other.  Windows come in ascending order."""
        ledger, found = self._ledger, self._stragglers.close(rows, matrix, lost)
        ledger.last_ranks = self._stragglers.waits.last_ranks
        ledger.waited = Waited(
            seconds=found.seconds,
            rank_seconds=found.rank_seconds,
            joules=found.joules,
            verdicts=self._stragglers.verdicts,
            num_named=len(self._stragglers.named_ranks),
            slowest=found.slowest,
        )
        if found.seconds is not None:
            ledger.straggling_s = (ledger.straggling_s or 0.0) + found.seconds
        if found.rank_seconds:
            known = ledger.straggling_j is not None and found.joules is not None
            ledger.straggling_j = ledger.straggling_j + found.joules if known else None  # type: ignore[operator]
            ledger.straggling_gpu_s += found.rank_seconds
        for event in found.events:
            self._report(event)
        return found.lost
