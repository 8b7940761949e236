"""The elapsed time and the joules of a job by class, over all restarts. No I/O.

The reports of a rank cover its wall time without gaps or overlaps.  Time without a report is idle before the rank
joined or after the rank left, else unknown.  The time between two attempts is the restart gap.  So the sum of all
classes is the elapsed time.  Definitions: docs/goodput.md.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from effllm.job.goodput_attempt import CLASSES, IDLE, KEPT, PARTS, RESTART_GAP, UNKNOWN, Attempt
from effllm.job.goodput_tiles import Axis
from effllm.records.job import AttemptSummary, GoodputSummary
from effllm.records.rank import GENERATION, STARTUP
from effllm.records.verdict import OF_GPUS, OF_RANKS, LossWindows
from effllm.records.wire import Hello

#: The classes of productive time.
PRODUCTIVE = (KEPT, GENERATION)
#: A class with a smaller share of the elapsed time, or with a shorter time, is a rounding error of unix times.
MIN_SHARE, MIN_CLASS_S = 1e-9, 1e-6
#: Classes without energy, because no agent reports in them.
UNREPORTED = (RESTART_GAP, IDLE, UNKNOWN)

MAX_OLD_SPANS = 4096  # maximum number of spans of all attempts except the newest two
MAX_ATTEMPTS = 1000  # maximum number of attempts; older attempts are merged


class Goodput(Struct):
    """The time of a run by class, and the spans from which lost work is computed later."""

    clock: Axis = msgspec.field(default_factory=Axis)
    attempts: list[Attempt] = msgspec.field(default_factory=lambda: [Attempt(1)])

    @property
    def attempt(self) -> Attempt:
        return self.attempts[-1]

    def note_last_message(self, ago_s: float = 0.0) -> None:
        """Record that the last message of any rank arrived ``ago_s`` seconds ago; the first begins the attempt."""
        attempt, now_axis_s = self.attempt, self.clock.at_s or 0.0
        if not attempt.zero_time_s:
            attempt.zero_time_s = self.clock.time_s - now_axis_s
        receipt_axis_s = now_axis_s - max(ago_s, 0.0)
        if attempt.begin_s is None:
            attempt.begin_s = receipt_axis_s
        attempt.heard_s = max(attempt.heard_s, receipt_axis_s)

    def note_hello(self, message: Hello, is_new: bool) -> None:
        """Record the HELLO of a connection; ``is_new`` means that the agent is new."""
        attempt, rank = self.attempt, message.rank
        attempt.world_size = max(attempt.world_size, message.world_size)
        attempt.is_numbered = attempt.is_numbered or message.is_numbered
        if not attempt.last:
            attempt.offset = attempt.offset_at_start = message.offset
        if is_new:
            attempt.ranks.note_return(rank, self.clock.at_s or 0.0)
        self.note_message(rank, message.time_s)
        start_axis_s = attempt.ranks.note_start(rank, message.start_time_s)
        if attempt.begin_s is not None and start_axis_s < attempt.begin_s:
            attempt.begin_s = start_axis_s

    def note_message(self, rank: int, time_s: float | None) -> None:
        """Record a message of a rank, with its time of sending on the agent's clock."""
        self.attempt.ranks.note_message(rank, self.clock.at_s or 0.0, time_s)

    def note_bye(self, rank: int, end_time_s: float | None = None, last_ordinal: int = 0) -> None:
        """Record a rank's last message: the time of its end by the agent's clock, and its last iteration."""
        self.attempt.reached = max(self.attempt.reached, last_ordinal)
        self.attempt.ranks.note_bye(rank, self.clock.at_s or 0.0, end_time_s)

    def end_attempt(self, status: str) -> None:
        """End the running attempt, and append the next one; old attempts and their spans are merged."""
        self.attempt.end(status)
        self.attempts.append(Attempt(self.attempt.number + 1))
        if len(self.attempts) > MAX_ATTEMPTS:
            self.attempts[0].absorb(self.attempts.pop(1))
        for old in self.attempts[:-2]:
            old.merge_spans(max(MAX_OLD_SPANS // len(self.attempts), 1))
        self.clock.is_resumed = True  # the next attempt may have another host

    def windows_of(self, name: str, min_share: float) -> LossWindows | None:
        """Return the windows in which a class of `PARTS` has at least this share of the time of the iterations."""
        part, num_windows, first_shown, last_shown, worst_shown, worst_share = PARTS.index(name), 0, 0, 0, 0, 0.0
        for attempt in self.attempts:
            for span in attempt.spans:
                seconds = span.seconds
                share = seconds[part] / sum(seconds) if span.last >= span.first and sum(seconds) > 0 else 0.0
                if share >= min_share:
                    last_shown = span.last + attempt.offset  # the number that users see, of the span's last iteration
                    first_shown = first_shown or last_shown
                    num_windows += span.window_last - span.window_first + 1
                    if share > worst_share:
                        worst_shown, worst_share = last_shown, share
        return LossWindows(num_windows, first_shown, last_shown, worst_shown, worst_share) if num_windows else None

    @property
    def start_time_s(self) -> float | None:
        """Unix time at which the first attempt started; ``None`` before the first rank has joined."""
        return next((each.zero_time_s + each.begin_s for each in self.attempts if each.begin_s is not None), None)

    @property
    def end_time_s(self) -> float | None:
        """Unix time of the end of the last attempt, which must be over; ``None`` if no rank has joined it."""
        last = self.attempts[-1] if self.attempts else None
        return None if last is None or last.begin_s is None else last.zero_time_s + max(last.known_end_s, last.begin_s)

    def summary(self, is_over: bool = False, measures_energy: bool = True, status: str = "running") -> GoodputSummary:
        """Return the classes so far; ``status`` is that of the running attempt.

        If the job ``is_over``, time after its last message does not count.
        """
        seconds, rank_seconds, device_seconds = (dict.fromkeys(CLASSES, 0.0) for _ in range(3))
        joules: dict[str, float | None] = dict.fromkeys(CLASSES, 0.0)
        attempts: list[AttemptSummary] = []
        elapsed_s, unused_s, data_s, previous, previous_per_rank = 0.0, 0.0, 0.0, None, 0.0
        unit, devices_per_rank = self._devices_per_rank()
        attempts_with_restarts = zip(self.attempts, self._first_repeated(), devices_per_rank, strict=True)
        for attempt, (first_repeated, is_redone_known), per_rank in attempts_with_restarts:
            end_s = self._end_s(attempt, is_over)
            duration_s = max(end_s - attempt.begin_s, 0.0) if attempt.begin_s is not None else 0.0
            gap_s = 0.0
            if previous is not None and attempt.begin_s is not None:
                gap_s = max(attempt.begin_s - (previous.end_s or 0.0), 0.0)
                seconds[RESTART_GAP] += gap_s
                rank_seconds[RESTART_GAP] += gap_s * previous.world_size
                device_seconds[RESTART_GAP] += gap_s * previous.world_size * previous_per_rank
                unused_s += gap_s * (previous.unused_gpus or 0)
            attempt.compute_redone(first_repeated)
            classes_s = attempt.seconds_by_class(end_s)
            for name, value in classes_s.items():
                rank_seconds[name] += value
                device_seconds[name] += value * per_rank
                seconds[name] += value / max(attempt.world_size, 1)
            for name, value in attempt.joules_by_class().items():
                joules[name] = (joules[name] or 0.0) + value
            elapsed_s += duration_s + gap_s
            unused_s += duration_s * (attempt.unused_gpus or 0)
            data_s += max(attempt.data_in_steps_s, 0.0) * per_rank
            startup_s = classes_s.get(STARTUP, 0.0) / max(attempt.world_size, 1)
            attempts.append(_attempt_summary(attempt, duration_s, gap_s, startup_s, status, is_redone_known, per_rank))
            if attempt.begin_s is not None:
                previous, previous_per_rank = attempt, per_rank
        _move_rounding_errors(elapsed_s, seconds, rank_seconds, device_seconds)
        for name in CLASSES:
            if not measures_energy or (name in UNREPORTED and seconds[name] > 0):
                joules[name] = None
        productive_s = sum(seconds[name] for name in PRODUCTIVE)
        redone = [attempt.redone_iterations for attempt in attempts if attempt.redone_iterations is not None]
        return GoodputSummary(
            elapsed_s=elapsed_s,
            ratio=productive_s / elapsed_s if elapsed_s > 0 else None,
            seconds=seconds,
            rank_seconds=rank_seconds,
            joules=joules,
            redone_iterations=sum(redone) if len(redone) == len(attempts) else None,
            attempts=tuple(attempts),
            device_seconds=device_seconds,
            unit=unit,
            data_in_steps_s=data_s,
            unused_gpu_seconds=unused_s,
        )

    def _devices_per_rank(self) -> tuple[str, list[float]]:
        """Return the unit of device-seconds, and the number of devices of a rank in each attempt.

        An attempt whose GPUs are unknown has the GPUs per rank of the next attempt in which they are known, else of the
        attempt before.  An attempt whose ranks had no GPU has no number, because rank-seconds are no GPU-seconds.
        """
        gpus = [attempt.gpus / attempt.ranks_joined if attempt.ranks_joined else None for attempt in self.attempts]
        if not any(gpus):
            return OF_RANKS, [1.0] * len(gpus)
        for i in reversed(range(len(gpus) - 1)):
            gpus[i] = gpus[i + 1] if gpus[i] is None else gpus[i]
        for i in range(1, len(gpus)):
            gpus[i] = gpus[i - 1] if gpus[i] is None else gpus[i]
        return OF_GPUS, [count or 0.0 for count in gpus]

    def _end_s(self, attempt: Attempt, is_over: bool) -> float:
        """Return the end of an attempt on the axis; of a running attempt in a job that is not over, the present."""
        if attempt.end_s is not None:
            return attempt.end_s
        return attempt.known_end_s if is_over else max(attempt.heard_s, self.clock.at_s or 0.0)

    def _first_repeated(self) -> list[tuple[float | None, bool]]:
        """Return for each attempt the smallest iteration number at which a later attempt began, from which on it is
        repeated (``None`` without such a number), and whether its repeated iterations are known.

        They are unknown if a later attempt with iterations has no numbers, or if a later attempt has repeated and this
        one has no numbers and is not the first with iterations.  Without iterations, none were repeated.
        """
        first_repeated: list[tuple[float | None, bool]] = []
        smallest: float | None = None
        are_later_numbered = True
        first = next((attempt for attempt in self.attempts if attempt.last), None)
        for attempt in reversed(self.attempts):
            is_numbered_or_empty = attempt.is_numbered or not attempt.last
            is_comparable = is_numbered_or_empty or attempt is first  # the first one begins at 1
            is_redone_known = are_later_numbered and (is_comparable or smallest is None)
            first_repeated.append((smallest, is_redone_known or not attempt.last))
            are_later_numbered = are_later_numbered and is_numbered_or_empty
            if attempt.is_numbered and attempt.begin_s is not None:
                smallest = attempt.offset + 1 if smallest is None else min(smallest, attempt.offset + 1)
        return first_repeated[::-1]


def _attempt_summary(
    attempt: Attempt, elapsed_s: float, gap_s: float, startup_s: float, status: str, has_redone: bool, per_rank: float
) -> AttemptSummary:
    """Return the entry in summary.json; ``startup_s`` is a mean over ranks, ``per_rank`` a number of devices."""
    begin_s = attempt.zero_time_s + (attempt.begin_s or 0.0)
    return AttemptSummary(
        attempt=attempt.number,
        status=status if attempt.end_s is None else attempt.status,
        start_time_s=begin_s,
        end_time_s=begin_s + elapsed_s,
        elapsed_s=elapsed_s,
        gap_before_s=gap_s,
        world_size=attempt.world_size,
        iterations=attempt.last - attempt.first + 1 if attempt.last else 0,
        first=attempt.first + attempt.offset if attempt.last else None,
        last=attempt.last + attempt.offset if attempt.last else None,
        redone_iterations=attempt.redone.iterations if has_redone else None,
        startup_s=startup_s,
        gpus=attempt.gpus if attempt.ranks_joined else None,
        unused_gpus=attempt.unused_gpus,
        devices=per_rank * attempt.world_size,
        redone_around_s=attempt.redone.around_s / max(attempt.world_size, 1),
        max_redone_around_s=attempt.redone.max_around_s / max(attempt.world_size, 1),
    )


def _move_rounding_errors(elapsed_s: float, seconds: dict[str, float], *others: dict[str, float]) -> None:
    """Add classes that are rounding errors to the largest class, so that the sums stay the same."""
    largest, min_s = max(seconds, key=lambda name: seconds[name]), max(MIN_SHARE * elapsed_s, MIN_CLASS_S)
    small = [name for name, class_s in seconds.items() if class_s < min_s and name != largest]
    for sums in (seconds, *others):
        for name in small:
            sums[largest] += sums[name]
            sums[name] = 0.0
