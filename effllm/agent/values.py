"""The values of the instruments of one rank, by window. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from effllm.records import ring
from effllm.records.framework_figures import FIGURES
from effllm.records.moments import Moments
from effllm.records.rank import WINDOW_CENTROIDS, ValueStatistics
from effllm.records.values import MAX_VALUE, centroids_of, digest_type, merged, merged_by_name, percentiles

#: Maximum number of open windows; values of further windows are added to the newest window.
MAX_WINDOWS = 64
PUBLISH_EVERY_S = 1.0
_NO_DIGEST = (
    "percentiles of instruments: not measured, because fastdigest is missing: pip install 'effllm[instruments]'"
)


class _Name(Moments):
    __slots__ = ("_digest",)

    def __init__(self) -> None:
        super().__init__()
        made: Any = digest_type()
        self._digest = made(WINDOW_CENTROIDS) if made is not None else None

    def add(self, value: float) -> bool:
        if abs(value) > MAX_VALUE:
            value = math.copysign(math.inf, value)
        is_finite = super().add(value)
        if is_finite and self._digest is not None:
            self._digest.update(value)
        return is_finite

    def statistics(self) -> ValueStatistics:
        nan, infinite, negative = (self.not_finite.get(name, 0) for name in ("nan", "inf", "-inf"))
        return ValueStatistics(
            count=self.count,
            total=self.total,
            squares=self.squares,
            least=self.minimum if self.count else 0.0,
            most=self.maximum if self.count else 0.0,
            not_finite=(nan, infinite, negative),
            centroids=centroids_of(self._digest) if self._digest is not None else (),
        )


class InstrumentValues:
    """Statistics of values by window and name, until the report of the window.

    Args:
        publish: writes percentiles of the whole run for the training process; ``False`` if there is no room.
    """

    def __init__(self, publish: Callable[[Mapping[str, Any]], bool] = lambda _: True) -> None:
        self._windows: dict[int, dict[int, _Name]] = {}  # values of open windows, by window and index of the name
        self._run: dict[str, ValueStatistics] = {}  # statistics of all values so far, by name
        self._publish, self._published_s = publish, -math.inf
        self._num = self._lost = 0  # values written by the training process; values that were overwritten in the ring
        self._notices: list[str] | None = None  # lines for the user; None before the first value of an instrument

    def add(self, slot: ring.Slot, window: int) -> None:
        """Add a record of the kind VALUES."""
        names = self._windows.get(window)
        if names is None:
            if len(self._windows) >= MAX_WINDOWS:
                window = max(self._windows)
            names = self._windows.setdefault(window, {})
        self._lost += max(slot.number - self._num - len(slot.values), 0)
        self._num = max(slot.number, self._num)
        for index, value in slot.values:
            if index not in names:
                names[index] = _Name()
            names[index].add(value)

    def take(self, window: int, names: Sequence[str], now_s: float, *, is_last: bool) -> dict[str, ValueStatistics]:
        """Return the statistics by name of the values up to a window, or of all values if ``is_last``."""
        taken = sorted(number for number in self._windows if is_last or number <= window)
        parts = [self._windows.pop(number) for number in taken]
        values = merged_by_name(
            {names[index]: one.statistics() for index, one in part.items() if index < len(names)} for part in parts
        )
        if self._notices is None and not values.keys() <= FIGURES.keys():  # percentiles of these figures are not shown
            self._notices = [_NO_DIGEST] if digest_type() is None else []
        for name, one in values.items():
            if one.centroids:
                self._run[name] = merged([self._run[name], one]) if name in self._run else one
        if is_last or now_s - self._published_s >= PUBLISH_EVERY_S:
            self._published_s = now_s
            known = {name: [one.count, *percentiles(one.centroids).values()] for name, one in self._run.items()}
            while known and not self._publish(known):  # no room: the first half or quarter of the names
                known = dict(islice(known.items(), len(known) // 2))
        return values

    def take_notice(self) -> str:
        """Return a line for the user, once."""
        if self._lost:
            line = (
                f"{self._lost} values of instruments are missing: they were overwritten before the agent read them, or "
                "a second thread recorded more than 1,000 values in one iteration"
            )
            self._lost = 0
            return line
        return self._notices.pop() if self._notices else ""
