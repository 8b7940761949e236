"""The line that says which ranks stand where: pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from effllm.health.hang import BETWEEN, STARTUP, STEP, STOPPED, Resumed, Stall, Stand
from effllm.runs.summary_text import duration as long_duration

MOST_NAMED = 8
MOST_GROUPS = 3


class Names:
    """What ranks and iterations are called.

    Args:
        where: of a rank: its host and device.
        shown_minus_ordinal: what makes the number that people know of an ordinal.
    """

    def __init__(self, where: Callable[[int], str], shown_minus_ordinal: int) -> None:
        self.where = where
        self.shown_minus_ordinal = shown_minus_ordinal

    def place(self, stand: Stand) -> str:
        """Return the iteration that a rank is in, or has ended, and what it does there."""
        if stand.state == STARTUP or (stand.state == STEP and not stand.ordinal):
            return "in start-up"
        number = str(stand.ordinal + self.shown_minus_ordinal)
        return number if stand.state == STEP else f"{number} ({'after it' if stand.state == BETWEEN else stand.state})"


def stall_text(
    stall: Stall,
    ranks: Mapping[int, Stand],
    names: Names,
    now_s: float,
    silent_s: Mapping[int, float],
    left: Mapping[int, str],
    num_missing: int,
) -> str:
    """Return the line: who is furthest behind and in which state, where the others are, of whom nothing is known.

    Args:
        stall: the verdict.
        ranks: where each of them stands.
        names: what they are called.
        now_s: the time.
        silent_s: for how long agents have said nothing, by their ranks.
        left: how ranks ended that are gone, by rank.
        num_missing: ranks that never came.
    """
    (first, behind), *others = stall.groups
    what = "stalled alone" if stall.is_partial else "stalled"
    parts = [f"{what}: {_behind(first, behind, [ranks[rank] for rank in behind], names, now_s, not others)}"]
    shown, rest = others[:MOST_GROUPS], others[MOST_GROUPS:]
    for stand, group in shown:
        place = names.place(stand)
        stopped = ", stopped" if stand.process == STOPPED else ""
        at = place if place == "in start-up" else f"at {place}"
        parts.append(f"{len(group)} other{'s' if len(group) > 1 else ''} {at}{stopped}")
    if rest:
        parts.append(f"{sum(len(group) for _, group in rest)} elsewhere")
    parts += [
        f"rank {rank} ({names.where(rank)}): its agent has said nothing for {seconds_text(silent_s[rank])}"
        for rank in sorted(silent_s)[:MOST_NAMED]
    ]
    if len(silent_s) > MOST_NAMED:
        parts.append(f"{len(silent_s) - MOST_NAMED} more agents say nothing")
    if left:
        words = ", ".join(f"{rank} ({left[rank]})" for rank in sorted(left)[:MOST_NAMED])
        parts.append(f"gone: rank{'s' if len(left) > 1 else ''} {words}{', ...' if len(left) > MOST_NAMED else ''}")
    if num_missing:
        parts.append(f"{num_missing} never came")
    return "; ".join(parts)


def resumed_text(resumed: Resumed) -> str:
    """Return the line of the end of a stall."""
    who = "" if resumed.rank is None else f"rank {resumed.rank} "
    return f"{who}resumed after {seconds_text(resumed.stood_s)}"


def _behind(
    first: Stand, behind: Sequence[int], stands: Sequence[Stand], names: Names, now_s: float, is_all: bool
) -> str:
    stood_s = now_s - max(stand.since_s for stand in stands)
    place = names.place(first)
    at = place if place == "in start-up" else f"at iteration {place}"
    facts = [f"{at} for {seconds_text(stood_s)}"]
    if first.process == STOPPED:
        facts.append("stopped by a signal")
    facts += _readings(stands)
    if len(behind) == 1:
        who = f"rank {behind[0]} ({names.where(behind[0])})"
    elif is_all:
        who = f"all {len(behind)} ranks"
    elif len(behind) <= MOST_NAMED:
        who = "ranks " + ", ".join(f"{rank} ({names.where(rank)})" for rank in behind)
    else:
        who = f"{len(behind)} ranks ({', '.join(map(str, behind[:MOST_NAMED]))}, ...)"
    return f"{who} {', '.join(facts)}"


def _readings(stands: Sequence[Stand]) -> list[str]:
    readings = []
    if busy := _range((stand.utilization for stand in stands), 100):
        readings.append(f"utilization {busy} %")
    if watts := _range((stand.power_w for stand in stands), 1):
        readings.append(f"{watts} W")
    return readings


def _range(values: Iterable[float | None], times: float) -> str:
    known = [round(value * times) for value in values if value is not None]
    if not known:
        return ""
    return str(known[0]) if min(known) == max(known) else f"{min(known)} to {max(known)}"


def seconds_text(seconds: float) -> str:
    """Return how long something stood: seconds up to a quarter of an hour, then as people say it."""
    return f"{seconds:.0f} s" if seconds < 900 else long_duration(seconds)
