"""Passes peers, clock offsets and windows to the detection of stragglers, and records its results in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from effllm.job.health.clock import Offset, aged
from effllm.job.health.evidence import Peer
from effllm.job.health.stragglers import Stragglers
from effllm.job.ledger import Ledger, Waited
from effllm.records.rank import Event, RankReport
from effllm.records.wire import Heartbeat, Hello


class StragglerWatch:
    """Judges closed windows, and records the results in the ledger.

    Args:
        ledger: the job's state.
        report: is called with each event.
    """

    def __init__(self, ledger: Ledger, report: Callable[[Event], None]) -> None:
        self._ledger, self._report = ledger, report
        self._stragglers = Stragglers(ledger.stragglers)
        self._clocks = _Clocks()

    def hello(self, message: Hello, is_new: bool) -> None:
        """Store the peer group of a rank; the clock offset of a replaced agent is dropped."""
        if is_new:
            self._clocks.forget(message.rank)
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

    def heartbeat(self, message: Heartbeat, now_s: float) -> None:
        if message.offset_s is not None and message.offset_error_s is not None:
            self._clocks.set(message.rank, Offset(message.offset_s, message.offset_error_s), now_s)

    def close(self, rows: Sequence[RankReport]) -> None:
        """Judge the next window; windows come in ascending order."""
        ledger, found = self._ledger, self._stragglers.close(rows, self._clocks)
        for window, rank_seconds in found.by_window.items():
            ledger.goodput.attempt.note_straggling(window, rank_seconds)
        ledger.waited = Waited(
            seconds=found.seconds,
            rank_seconds=found.rank_seconds,
            joules=found.joules,
            verdicts=self._stragglers.verdicts,
            num_named=self._stragglers.num_named,
            clock_error_s=self._clocks.worst_s(),
            slowest=found.slowest,
        )
        ledger.windows_compared += found.is_compared
        if found.slowest is not None:
            ledger.count_slowest(found.slowest.rank)
        if found.seconds is not None:
            ledger.straggling_s = (ledger.straggling_s or 0.0) + found.seconds
        if found.rank_seconds:
            known = ledger.straggling_j is not None and found.joules is not None
            ledger.straggling_j = ledger.straggling_j + found.joules if known else None  # type: ignore[operator]
            ledger.straggling_gpu_s += found.rank_seconds
        for event in found.events:
            self._report(event)


class _Clocks(Mapping[int, Offset]):
    """Offsets of the ranks' clocks from the aggregator's clock; the error of an offset grows with its age."""

    def __init__(self) -> None:
        self._offsets: dict[int, tuple[Offset, float]] = {}
        self._now_s = 0.0

    def set(self, rank: int, offset: Offset, now_s: float) -> None:
        self._offsets[rank] = offset, now_s
        self._now_s = now_s

    def forget(self, rank: int) -> None:
        self._offsets.pop(rank, None)

    def worst_s(self) -> float | None:
        """Return the largest error; ``None`` without offsets."""
        return max(
            (aged(offset.error_s, self._now_s - taken_s) for offset, taken_s in self._offsets.values()), default=None
        )

    def __getitem__(self, rank: int) -> Offset:
        offset, taken_s = self._offsets[rank]
        return Offset(offset.offset_s, aged(offset.error_s, self._now_s - taken_s))

    def __iter__(self) -> Iterator[int]:
        return iter(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)
