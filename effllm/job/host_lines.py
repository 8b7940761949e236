"""The lines of code in which the hosts of the ranks were, by recordings of their stacks. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec
from msgspec import Struct

from effllm.records.host_lines import MAX_LINES, HostLine, HostTime
from effllm.records.wire import HostSamples

#: Ranks whose lines are kept, and lines in the summary.
MAX_RANKS, MAX_SHOWN = 16, 40
#: With fewer samples of a loss, and for lines with a smaller share of them, no line is named.
MIN_SAMPLES, MIN_SHARE = 30, 0.2

#: Cause, or "" for the whole job -> whether a kind of samples belongs to its loss.  A host that waits for the device or
#: for other ranks does not keep the device waiting.
KINDS: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "data_loading": lambda kind: kind == "data",
        "between_iterations": lambda kind: kind not in ("device", "ranks", "forward", "backward", "optimizer"),
        "device_idle": lambda kind: kind not in ("device", "ranks"),
        "": lambda _kind: True,
    }
)


class HostLines(Struct):
    """The sums of all recordings of a job."""

    samples: int = 0
    torn: int = 0
    failed: str = ""  # why there is no recording
    ranks: list[int] = []
    by_kind: dict[str, int] = {}
    counts: dict[str, int] = {}  # samples by kind, line and function, as JSON

    def add(self, message: HostSamples) -> None:
        self.failed = message.failed or self.failed
        if not message.samples or (message.rank not in self.ranks and len(self.ranks) >= MAX_RANKS):
            return
        self.ranks = sorted({*self.ranks, message.rank})
        self.samples, self.torn = self.samples + message.samples, self.torn + message.torn
        for one in message.lines:
            self.by_kind[one.kind] = self.by_kind.get(one.kind, 0) + one.samples
            key = msgspec.json.encode((one.kind, one.line, one.function)).decode()
            if key in self.counts or len(self.counts) < MAX_RANKS * MAX_LINES:
                self.counts[key] = self.counts.get(key, 0) + one.samples

    def summary(self) -> HostTime | None:
        """Return the samples; ``None`` without a recording."""
        if not self.samples:
            return None
        ordered = Counter(self.counts).most_common(MAX_SHOWN)
        lines = (HostLine(*msgspec.json.decode(key, type=tuple[str, str, str]), count) for key, count in ordered)
        return HostTime(self.samples, self.torn, tuple(self.ranks), dict(self.by_kind), tuple(lines))


def lines_of(found: HostTime, cause: str) -> tuple[int, list[tuple[str, str, int]]]:
    """Return the samples of a loss, and its lines with their most frequent function, most samples first.

    Args:
        found: the samples.
        cause: a cause in `KINDS`.
    """
    belongs = KINDS[cause]
    by_line: dict[str, Counter[str]] = {}
    for one in found.lines:
        if belongs(one.kind):
            by_line.setdefault(one.line, Counter())[one.function] += one.samples
    lines = [(line, functions.most_common(1)[0][0], functions.total()) for line, functions in by_line.items()]
    return sum(count for kind, count in found.by_kind.items() if belongs(kind)), sorted(lines, key=lambda one: -one[2])


def where(found: HostTime | None, cause: str) -> str:
    """Return where the host was during a loss, in words; "" if too few samples show it."""
    if found is None or not cause or cause not in KINDS:
        return ""
    samples, lines = lines_of(found, cause)
    if samples < MIN_SAMPLES or not lines or lines[0][2] < MIN_SHARE * samples:
        return ""
    line, function, count = lines[0]
    place = f"{function}, called in {line}" if function else line
    return f"in {100 * count / samples:.0f} % of {samples:,} samples the host was in {place}"
