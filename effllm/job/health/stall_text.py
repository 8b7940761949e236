"""Text of a stall event, with the positions of the ranks. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from effllm.job.health.hang import BETWEEN, STARTUP, STEP, STOPPED, RankPosition, Resumed, Stall
from effllm.store.summary_text import duration as long_duration

MAX_NAMED = 8
MAX_GROUPS = 3


class Names:
    """Names of ranks and iterations.

    Args:
        where: returns host and device of a rank.
        shown_minus_ordinal: displayed number of an iteration minus its ordinal.
    """

    def __init__(self, where: Callable[[int], str], shown_minus_ordinal: int) -> None:
        self.where = where
        self.shown_minus_ordinal = shown_minus_ordinal

    def place(self, position: RankPosition) -> str:
        """Return the current or last iteration of a rank, and its state."""
        if position.state == STARTUP or (position.state == STEP and not position.ordinal):
            return "in start-up"
        number = str(position.ordinal + self.shown_minus_ordinal)
        return (
            number
            if position.state == STEP
            else f"{number} ({'ended' if position.state == BETWEEN else position.state})"
        )


def stall_text(
    stall: Stall,
    ranks: Mapping[int, RankPosition],
    names: Names,
    now_s: float,
    lost_s: Mapping[int, float],
    left: Mapping[int, str],
    num_missing: int,
) -> str:
    """Return the text: the ranks that are furthest behind, other ranks, and ranks of unknown state.

    Args:
        stall: the verdict.
        ranks: positions by rank.
        names: names of ranks and iterations.
        now_s: current time.
        lost_s: seconds since the last heartbeat of each lost rank.
        left: status of each rank that sent a BYE but did not complete.
        num_missing: number of ranks that never joined.
    """
    (first, behind), *others = stall.groups
    what = "stalled alone" if stall.is_partial else "stalled"
    parts = [f"{what}: {_behind(first, behind, [ranks[rank] for rank in behind], names, now_s, not others)}"]
    shown, rest = others[:MAX_GROUPS], others[MAX_GROUPS:]
    for position, group in shown:
        place = names.place(position)
        stopped = ", stopped" if position.process == STOPPED else ""
        at = place if place == "in start-up" else f"at {place}"
        parts.append(f"{len(group)} other{'s' if len(group) > 1 else ''} {at}{stopped}")
    if rest:
        parts.append(f"{sum(len(group) for _, group in rest)} at other positions")
    parts += [
        f"rank {rank} ({names.where(rank)}): no heartbeat for {seconds_text(lost_s[rank])}"
        for rank in sorted(lost_s)[:MAX_NAMED]
    ]
    if len(lost_s) > MAX_NAMED:
        parts.append(f"{len(lost_s) - MAX_NAMED} more ranks without a heartbeat")
    if left:
        words = ", ".join(f"{rank} ({left[rank]})" for rank in sorted(left)[:MAX_NAMED])
        parts.append(f"left: rank{'s' if len(left) > 1 else ''} {words}{', ...' if len(left) > MAX_NAMED else ''}")
    if num_missing:
        parts.append(f"{num_missing} ranks never joined")
    return "; ".join(parts)


def resumed_text(resumed: Resumed) -> str:
    who = "" if resumed.rank is None else f"rank {resumed.rank} "
    return f"{who}resumed after {seconds_text(resumed.unmoved_s)}"


def _behind(
    first: RankPosition,
    behind: Sequence[int],
    positions: Sequence[RankPosition],
    names: Names,
    now_s: float,
    is_all: bool,
) -> str:
    unmoved_s = now_s - max(position.since_s for position in positions)
    place = names.place(first)
    at = place if place == "in start-up" else f"at iteration {place}"
    facts = [f"{at} for {seconds_text(unmoved_s)}"]
    if first.process == STOPPED:
        facts.append("stopped by a signal")
    facts += _readings(positions)
    if len(behind) == 1:
        who = f"rank {behind[0]} ({names.where(behind[0])})"
    elif is_all:
        who = f"all {len(behind)} ranks"
    elif len(behind) <= MAX_NAMED:
        who = "ranks " + ", ".join(f"{rank} ({names.where(rank)})" for rank in behind)
    else:
        who = f"{len(behind)} ranks ({', '.join(map(str, behind[:MAX_NAMED]))}, ...)"
    return f"{who} {', '.join(facts)}"


def _readings(positions: Sequence[RankPosition]) -> list[str]:
    readings = []
    if busy := _range((position.utilization for position in positions), 100):
        readings.append(f"utilization {busy} %")
    if watts := _range((position.power_w for position in positions), 1):
        readings.append(f"{watts} W")
    return readings


def _range(values: Iterable[float | None], times: float) -> str:
    known = [round(value * times) for value in values if value is not None]
    if not known:
        return ""
    return str(known[0]) if min(known) == max(known) else f"{min(known)} to {max(known)}"


def seconds_text(seconds: float) -> str:
    """Return a duration as text: in seconds below 15 minutes, else in hours and minutes."""
    return f"{seconds:.0f} s" if seconds < 900 else long_duration(seconds)
