"""The registry of event kinds, with the outputs and the meaning of each kind, and the limit of their lines. No I/O.

A kind that is not registered here is shown on the console, because a missing entry must be noticed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from effllm.records.rank import Event

#: Limit of the lines of one kind and rank in a minute.
MAX_PER_MINUTE = 100
MINUTE_S = 60.0
#: Limit of the lines of one kind over all ranks: its first value, and its growth in each minute.
MAX_OF_KIND, MORE_OF_KIND = 20_000, 300
#: A longer text counts as several lines of this many bytes.
LINE_BYTES = 500

#: Levels: the outputs of an event.  Every event is counted and written to events.jsonl.
FILE = "file"  # only in events.jsonl
ONCE = "console, each text once"
ALWAYS = "console, every time"


@dataclass(frozen=True)
class Kind:
    """One kind of event."""

    level: str  # FILE, ONCE or ALWAYS
    help: str  # one sentence for a reader of the event
    is_problem: bool = False  # shown in colour on a terminal


KINDS: dict[str, Kind] = {
    # Ranks and agents
    "joined": Kind(FILE, "A rank's agent connected."),
    "started": Kind(ALWAYS, "All ranks of an attempt have connected."),
    "left": Kind(FILE, "A rank ended; the text has the rank's status."),
    "rank_lost": Kind(ONCE, "A rank's agent sent no heartbeat for 15 s, or the agent died.", is_problem=True),
    "back": Kind(ONCE, "The agent of a lost rank sends heartbeats again."),
    "missing": Kind(FILE, "A window closed without the report of a rank."),
    "late": Kind(FILE, "A report arrived after its window had closed; the totals were corrected."),
    "reports_lost": Kind(ALWAYS, "Reports of a rank were lost and will never arrive.", is_problem=True),
    "restarted": Kind(ALWAYS, "The job was started again and continues in the same run folder."),
    "agent": Kind(FILE, "Any other event of an agent or its devices."),
    "warning": Kind(ONCE, "A warning from the training process.", is_problem=True),
    "disagreement": Kind(ONCE, "Ranks report different parameter counts of the whole model.", is_problem=True),
    # Connections
    "rejected": Kind(
        ONCE, "A peer was rejected; a repeated rejection is counted, but has no line of its own.", is_problem=True
    ),
    "garbage": Kind(ONCE, "A frame was rejected because it could not be decoded.", is_problem=True),
    "implausible": Kind(
        ONCE, "A rank stated a time or a number that is not possible; such values are rejected.", is_problem=True
    ),
    "security": Kind(FILE, "Connections have no encryption and no keys."),
    "descriptors": Kind(ALWAYS, "The limit of open files is too low for the job.", is_problem=True),
    # The aggregator and its sinks
    "aggregator": Kind(ALWAYS, "The aggregator could not be started, or died and was replaced.", is_problem=True),
    "sink": Kind(ONCE, "A sink cannot be opened, fails, or is too slow.", is_problem=True),
    # Devices
    "not_measured": Kind(ONCE, "A device cannot measure a quantity; the text has the reason."),
    "stale": Kind(ONCE, "A read of a device does not return, or reads return again.", is_problem=True),
    "xid": Kind(ALWAYS, "The driver reported an Xid error of a GPU.", is_problem=True),
    "ecc": Kind(ALWAYS, "A GPU reported uncorrected memory errors.", is_problem=True),
    # Energy
    "energy_counter": Kind(ONCE, "The energy counter of a GPU is not used, or is used again.", is_problem=True),
    "energy_calibration": Kind(ONCE, "The calibration of a GPU was wrong, and was removed from the cache."),
    "energy_aliasing": Kind(
        ONCE, "Iterations are synchronous with a power sensor: the energy has a larger error.", is_problem=True
    ),
    "energy_doubtful": Kind(
        ONCE, "Most windows are too short for the power sensors; the energy of windows is not shown.", is_problem=True
    ),
    # Memory
    "memory_forecast": Kind(
        ONCE, "The memory of a GPU will run out: the text has the time, the cause and the interval.", is_problem=True
    ),
    "memory_leak": Kind(
        ONCE, "The memory of a GPU or of a training process grows steadily in all iterations.", is_problem=True
    ),
    "out_of_memory": Kind(
        ALWAYS,
        "torch could not allocate memory of a GPU; the text has the peaks, retries and fragmentation.",
        is_problem=True,
    ),
    # Training
    "mfu": Kind(
        ONCE, "MFU or HFU is above 1: the number of FLOPs, the number of tokens or the peak is wrong.", is_problem=True
    ),
    "audit": Kind(ONCE, "A check of counts or of MFU failed; the text has the factor.", is_problem=True),
    "loss_not_finite": Kind(ALWAYS, "The loss has become NaN or infinite.", is_problem=True),
    "loss_finite": Kind(ALWAYS, "The loss is finite again."),
    "gpu_shared": Kind(ONCE, "Several ranks use the same GPU, and nothing says that they share it.", is_problem=True),
    "gpus_unused": Kind(ALWAYS, "More GPUs of a host are allocated to the job than its ranks use.", is_problem=True),
    "gpus_idle": Kind(ALWAYS, "The GPUs were busy for less than 20 % of the time in several windows.", is_problem=True),
    "gpus_busy": Kind(ALWAYS, "The GPUs work again after an idle time."),
    "stalled": Kind(ALWAYS, "No rank makes progress; the position of each rank is listed.", is_problem=True),
    "resumed": Kind(ALWAYS, "The job makes progress again after a stall."),
    "stack": Kind(ONCE, "Stacks of stalled ranks were written; the text lists the files."),
    "straggler": Kind(ALWAYS, "A rank is slower than its peers and delays the job.", is_problem=True),
    "recovered": Kind(ALWAYS, "A straggler is as fast as its peers again."),
}
_UNKNOWN = Kind(ONCE, "")


def level_of(kind: str) -> str:
    return KINDS.get(kind, _UNKNOWN).level


def is_problem(kind: str) -> bool:
    return KINDS.get(kind, _UNKNOWN).is_problem


class EventLimit:
    """Selects the events that become lines: at most `MAX_PER_MINUTE` of one kind and rank in a minute.

    Every event is counted by its kind.  The events without a line of their own become one line with their number, so
    the counts of all lines add up to the number of events.
    """

    def __init__(self) -> None:
        self._minute_start_s: float | None = None
        self._lines_this_minute: dict[tuple[str, int | None], int] = {}  # by kind and rank
        self._lines_left: dict[str, int] = {}  # by kind, for all ranks; grows every minute
        self._left_out: dict[tuple[str, int | None], Event] = {}  # kind and rank -> total of the events without a line

    def admit(self, event: Event) -> bool:
        """Return whether an event becomes a line; count an event without a line."""
        key, lines = (event.kind, event.rank), 1 + len(event.text) // LINE_BYTES
        lines_used, lines_left = self._lines_this_minute.get(key, 0), self._lines_left.get(event.kind, MAX_OF_KIND)
        if lines_used + 1 > MAX_PER_MINUTE or lines_left < 1:  # a long text may exceed a limit by its own lines
            self.leave_out(event, of_all_ranks=lines_left < 1)
            return False
        self._lines_this_minute[key] = lines_used + lines
        self._lines_left[event.kind] = lines_left - lines
        return True

    def leave_out(self, event: Event, *, of_all_ranks: bool = False) -> None:  # counts an event without a line
        key = (event.kind, None if of_all_ranks else event.rank)
        earlier = self._left_out.get(key)
        count = event.count + (earlier.count if earlier is not None else 0)
        text = f"too many events of kind {event.kind}: these events were only counted"
        if key[1] is not None:
            text = f"rank {key[1]}: {text}"
        self._left_out[key] = Event(event.time_s, event.kind, text, key[1], attempt=event.attempt, count=count)

    def take_left_out(self, now_s: float) -> list[Event]:
        """Return, once a minute and at the end (``math.inf``), a line for each kind and rank with omitted events."""
        if self._minute_start_s is None:
            self._minute_start_s = now_s if math.isfinite(now_s) else 0.0
        if now_s - self._minute_start_s < MINUTE_S:
            return []
        self._minute_start_s = now_s if math.isfinite(now_s) else self._minute_start_s
        left_out, self._left_out, self._lines_this_minute = list(self._left_out.values()), {}, {}
        self._lines_left = {kind: min(left + MORE_OF_KIND, MAX_OF_KIND) for kind, left in self._lines_left.items()}
        return left_out
