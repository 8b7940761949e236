"""The lines of code in which the hosts of the ranks were, by recordings of their stacks. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

import msgspec
from msgspec import Struct

from effllm.records.host_lines import COMPUTE, WORKER, CodeLine, HostTime
from effllm.records.verdict import Waterfall
from effllm.records.wire import HostSamples

#: Maximum numbers of ranks whose lines are kept, of lines in the summary, and of kept lines.
MAX_RANKS, MAX_SHOWN, MAX_COUNTS = 16, 40, 512
#: With fewer samples of a loss, and for lines with a smaller share of them, no line is named.
MIN_SAMPLES, MIN_SHARE = 30, 0.2
MIN_FETCH_SHARE = 0.5  # of the samples that waits for data should have, by their share of the time
MIN_TORCH_SHARE = 0.5  # of all samples, in functions of torch, so that these are reported as the place
#: A slow rank is in a line for a share of its samples that is larger than that of its peers by this.
MIN_SHARE_DIFFERENCE = 0.05
MAX_NAMED, MAX_DIGITS = 4, 10  # ranks in a text; digits of a line's number
_Z = 1.96  # standard deviations of a normal distribution, for a 95 % interval
SLOW = "slow_iterations"

#: Kinds in which the host waits for others, or is another process, so that no line of Python keeps the device waiting.
DEVICE = "device"
NOT_OF_HOST = (DEVICE, "ranks", WORKER)
#: Cause -> whether a kind of samples belongs to its loss; of `SLOW`, only samples in long iterations.
KINDS: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "data_loading": lambda kind: kind == "data",
        "between_iterations": lambda kind: kind not in (*NOT_OF_HOST, COMPUTE, "forward", "backward", "optimizer"),
        "device_idle": lambda kind: kind not in ("ranks", WORKER),
        SLOW: lambda kind: kind not in ("ranks", WORKER),  # a long wait for the device is an answer
        "checkpoint": lambda kind: kind == "checkpoint",
    }
)


class HostLines(Struct):
    """The sums of all recordings of a job."""

    torn: int = 0  # samples that could not be read while the stack changed
    failed: str = ""  # why there is no recording
    by_rank: dict[int, int] = {}  # rank -> samples, without those of workers
    by_kind: dict[str, int] = {}  # kind -> samples
    counts: dict[str, dict[int, int]] = {}  # kind, line and function as JSON -> rank -> samples
    long: dict[str, int] = {}  # the same key -> samples in long iterations

    def add_samples(self, message: HostSamples) -> None:
        self.failed = message.failed or self.failed
        rank = message.rank
        if not message.samples or (rank not in self.by_rank and len(self.by_rank) >= MAX_RANKS):
            return
        if not message.is_worker:
            self.by_rank[rank] = self.by_rank.get(rank, 0) + message.samples
            self.torn += message.torn
        for line in message.lines:
            self.by_kind[line.kind] = self.by_kind.get(line.kind, 0) + line.samples
            key = msgspec.json.encode((line.kind, line.line, line.function)).decode()
            if key in self.counts or len(self.counts) < MAX_COUNTS:
                samples_by_rank = self.counts.setdefault(key, {})
                samples_by_rank[rank] = samples_by_rank.get(rank, 0) + line.samples
                self.long[key] = self.long.get(key, 0) + line.long

    def summary(self) -> HostTime | None:
        """Return the samples, with at most `MAX_SHOWN` lines; ``None`` without a recording."""
        if not self.by_rank:
            return None
        lines = (
            CodeLine(
                *msgspec.json.decode(key, type=tuple[str, str, str]),
                samples=sum(by_rank.values()),
                long=self.long.get(key, 0),
                by_rank=dict(by_rank),
            )
            for key, by_rank in self.counts.items()
        )
        shown = tuple(sorted(lines, key=lambda line: (-line.long, -line.samples))[:MAX_SHOWN])
        return HostTime(sum(self.by_rank.values()), self.torn, dict(self.by_rank), dict(self.by_kind), shown)


def samples_and_places(host: HostTime, cause: str, data_share: float = 0.0) -> tuple[int, list[tuple[str, str, int]]]:
    """Return the number of samples of a loss, and its places as (text, most frequent function, samples), sorted.

    A place is a line; but lines in which a function runs its own code, and calls nothing, are one place.  If the loop
    waits for DataLoader workers, the samples are those of a worker.  ``data_share`` is the share of the time that is a
    wait for data.  The place with the most samples comes first.
    """
    kinds = _kinds_of_loss(host, cause, data_share)
    samples_of = attrgetter("long" if cause == SLOW else "samples")
    places = [
        (text, function, sum(map(samples_of, parts)))
        for text, function, parts in _places(line for line in host.lines if line.kind in kinds and samples_of(line))
    ]
    total = sum(samples for _, _, samples in places) if cause == SLOW else _samples_of_kinds(host, kinds)
    return total, sorted(places, key=lambda place: -place[2])


def data_wait_share(waterfall: Waterfall | None) -> float:
    """Return the share of the device time that is a wait for data."""
    return sum(part.share for part in waterfall.parts if part.name == "data") if waterfall is not None else 0.0


def is_of_worker(host: HostTime, cause: str) -> bool:
    """Whether the samples of a loss are those of a DataLoader worker."""
    return cause == "data_loading" and host.by_kind.get(WORKER, 0) >= MIN_SAMPLES


def _kinds_of_loss(host: HostTime, cause: str, data_share: float) -> set[str]:
    """Return the kinds of samples that show where the host was during a loss."""
    if is_of_worker(host, cause):
        return {WORKER}
    # A loop may fetch its batches itself: then few of the samples are in functions that are known to fetch, and the
    # others are about as many as the wait has.
    expected = data_share * host.samples
    if cause == "data_loading" and host.by_kind.get("data", 0) < MIN_FETCH_SHARE * expected:
        others = {kind for kind in host.by_kind if KINDS["between_iterations"](kind)}
        return others if MIN_FETCH_SHARE * _samples_of_kinds(host, others) <= expected else set()
    kinds = {kind for kind in host.by_kind if KINDS[cause](kind)}
    if cause == "device_idle":
        # While the host waits for the device, or torch starts kernels, the device is rather busy; other code is rather
        # the reason if it is a fifth of all samples, or half of those without a wait.
        others = kinds - {COMPUTE, DEVICE}
        count, waits = _samples_of_kinds(host, others), _samples_of_kinds(host, {DEVICE})
        if count and count >= min(MIN_SHARE * host.samples, (host.samples - waits) / 2):
            return others
        # After a wait for the device, the device is idle until the next kernels.
        return kinds & {DEVICE if waits >= MIN_SHARE * host.samples else COMPUTE}
    return kinds


def _samples_of_kinds(host: HostTime, kinds: Collection[str]) -> int:
    return sum(host.by_kind.get(kind, 0) for kind in kinds)


def place_text(host: HostTime | None, cause: str, data_share: float = 0.0) -> str:
    """Return where the host was during a loss, in words; "" with few samples.  Arguments: `samples_and_places`."""
    if host is None or cause not in KINDS:
        return ""
    samples, places = samples_and_places(host, cause, data_share)
    kinds = _kinds_of_loss(host, cause, data_share)
    if cause == "device_idle" and kinds <= {COMPUTE}:
        text = f"{_share_text(samples, host.samples)} samples the host was in functions of torch, which start kernels"
        return text if samples >= max(MIN_TORCH_SHARE * host.samples, MIN_SAMPLES) else ""
    if samples < MIN_SAMPLES or not places or places[0][2] < MIN_SHARE * samples:
        return ""
    line, function, count = places[0]
    place = f"{function}, called in {line}" if function else line
    if cause == "device_idle" and kinds == {DEVICE}:
        return f"{_share_text(samples, host.samples)} samples the host waited for the device, most in {place}"
    of = " of long iterations" if cause == SLOW else ""
    who = "a DataLoader worker" if is_of_worker(host, cause) else "the host"
    return f"{_share_text(count, samples)} samples{of} {who} was in {place}"


def _share_text(count: int, total: int) -> str:
    return f"in {100 * count / total:.0f} % of {total:,}"


def place_text_of_slow(host: HostTime | None, slow: Collection[int]) -> str:
    """Return the line in which slow ranks are more often than the others, in words; "" if too few samples show it."""
    if host is None:
        return ""
    ranks = [rank for rank in host.by_rank if rank in slow]
    others = [rank for rank in host.by_rank if rank not in slow]
    total, total_of_others = totals = [sum(host.by_rank[rank] for rank in group) for group in (ranks, others)]
    if min(totals) < MIN_SAMPLES:
        return ""
    differences: dict[str, float] = {}  # place -> share of the slow ranks' samples, minus that of the others
    counts = {}
    for place, _, parts in _places(line for line in host.lines if line.kind not in NOT_OF_HOST):
        counts[place] = count, count_of_others = _samples_of_ranks(parts, ranks), _samples_of_ranks(parts, others)
        if share_interval(count, total)[0] > share_interval(count_of_others, total_of_others)[1]:
            differences[place] = count / total - count_of_others / total_of_others
    place = max(differences, key=differences.__getitem__, default="")
    if not place or differences[place] < MIN_SHARE_DIFFERENCE:
        return ""
    shares = [f"{100 * count / total:.0f} %" for count, total in zip(counts[place], totals, strict=True)]
    return f"{_ranks_text(ranks)} is in {place} in {shares[0]} of the samples, {_ranks_text(others)} in {shares[1]}"


def share_interval(count: int, total: int) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a share of samples (Wilson, J. Am. Stat. Assoc. 22, 1927).

    >>> [round(share, 3) for share in share_interval(5, 10)]
    [0.237, 0.763]
    """
    center, square = (count + _Z**2 / 2) / (total + _Z**2), count * (total - count) / total + _Z**2 / 4
    half_width = _Z * math.sqrt(square) / (total + _Z**2)
    return center - half_width, center + half_width


def _places(lines: Iterable[CodeLine]) -> Iterator[tuple[str, str, list[CodeLine]]]:
    """Yield places as text, with their most frequent function and their parts."""
    by_line: dict[str, list[CodeLine]] = {}
    for part in lines:
        by_line.setdefault(part.line, []).append(part)
    places: dict[tuple[str, str], list[CodeLine]] = {}
    for line, parts in by_line.items():
        function = max(parts, key=lambda part: part.samples).function
        # Lines that call nothing are one place, without their number: "load (data.py:41)" becomes "load (data.py".
        places.setdefault((line if function else line.rpartition(":")[0], function), []).extend(parts)
    for (_, function), parts in places.items():
        yield _line_range([part.line for part in parts]), function, parts


def _line_range(lines: Sequence[str]) -> str:
    """Return lines of a function as one text, from the first to the last.

    >>> _line_range(["f (a.py:7)", "f (a.py:12)"])
    'f (a.py:7-12)'
    """
    first, last = min(lines, key=_line_number), max(lines, key=_line_number)
    return first if first == last else f"{first[:-1]}-{_line_number(last)})"


def _line_number(line: str) -> int:
    digits = line.rpartition(":")[2].rstrip(")")
    return int(digits) if digits.isdecimal() and len(digits) < MAX_DIGITS else 0


def _samples_of_ranks(parts: Iterable[CodeLine], ranks: Collection[int]) -> int:
    return sum(part.by_rank.get(rank, 0) for part in parts for rank in ranks)


def _ranks_text(ranks: Collection[int]) -> str:
    return f"rank {','.join(map(str, sorted(ranks)))}" if len(ranks) <= MAX_NAMED else f"{len(ranks)} ranks"
