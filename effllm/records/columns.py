"""Running sums of many ranks or devices side by side: a row for each, a column for each quantity; pure.

Ten thousand objects of eight floats take a hundred times as long to add up as one array of them does.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Positions: TypeAlias = NDArray[np.intp]
Key: TypeAlias = int | str

#: How arrays are kept in state.json: exactly, on whatever machine.
_STORED = np.dtype("<f8")


def fields_of(items: Sequence[Any], names: Sequence[str]) -> Array:
    """Return numbers of objects as an array, a row for each; ``None`` becomes nan."""
    if len(names) == 1:
        return np.array(list(map(attrgetter(*names), items)), np.float64).reshape(-1, 1)
    rows = map(attrgetter(*names), items)
    try:
        flat = np.fromiter(chain.from_iterable(rows), np.float64, len(items) * len(names))
    except TypeError:  # one of them is None
        return np.array([attrgetter(*names)(item) for item in items], np.float64).reshape(len(items), len(names))
    return flat.reshape(len(items), len(names))


def means(sums: Array, covered_s: Array) -> Array:
    """Return means over time, of those that cover any."""
    there = covered_s > 0
    found: Array = sums[there] / covered_s[there]
    return found


class Table:
    """Numbers by key and name, which grow with their keys."""

    NAMES: ClassVar[tuple[str, ...]] = ()
    EMPTY: ClassVar[tuple[float, ...]] = ()  # a new row; zeros where it is empty

    def __init__(self) -> None:
        self._positions: dict[Key, int] = {}
        self._values: Array = np.zeros((0, len(self.NAMES)))
        self._found: tuple[Sequence[Key], Positions] = (), np.zeros(0, np.intp)

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def keys(self) -> Iterable[Key]:
        """The keys, in the order in which they came."""
        return self._positions.keys()

    @property
    def values(self) -> Array:
        """A view of all numbers, a row for each key."""
        return self._values[: len(self._positions)]

    def column(self, name: str) -> Array:
        """Return a view of the numbers of one name."""
        return self.values[:, self.NAMES.index(name)]

    def find(self, keys: Sequence[Key]) -> Positions:
        """Return the rows of keys; those that are new get one."""
        asked, found = self._found  # the same from window to window, as a rule
        if asked is keys or asked == keys:
            return found
        if not self._positions:
            self._positions = dict(zip(keys, range(len(keys)), strict=True))
            self._grow(len(self._positions))
        try:
            found = np.fromiter(map(self._positions.__getitem__, keys), np.intp, len(keys))
        except KeyError:
            for key in keys:
                self._positions.setdefault(key, len(self._positions))
            self._grow(len(self._positions))
            found = np.fromiter(map(self._positions.__getitem__, keys), np.intp, len(keys))
        self._found = keys, found
        return found

    def position(self, key: Key) -> int:
        """Return the row of one key, which gets one if it is new; `find` remembers those of a whole world."""
        at = self._positions.get(key)
        if at is None:
            at = self._positions[key] = len(self._positions)
            self._grow(at + 1)
        return at

    def _grow(self, count: int) -> None:
        if count > len(self._values):
            more = np.zeros((max(count, 2 * len(self._values)) - len(self._values), len(self.NAMES)))
            if self.EMPTY:
                more[:] = self.EMPTY
            self._values = np.concatenate((self._values, more))

    def packed(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return {"keys": list(self._positions), "values": np.ascontiguousarray(self.values, _STORED).tobytes()}

    @classmethod
    def unpacked(cls, stored: Mapping[str, Any]) -> Table:
        """Undo `packed`, after JSON has made text of bytes.

        Raises:
            ValueError: these are no such values.
        """
        table = cls()
        try:
            table.find(stored["keys"])
            table.values[:] = array_of(stored["values"]).reshape(len(table), len(cls.NAMES))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no table: {error}") from error
        return table


def array_of(text: str) -> Array:
    """Return the array that bytes in Base64 hold.

    Raises:
        ValueError: it holds none.
    """
    return np.frombuffer(base64.b64decode(text), _STORED).astype(np.float64)


def to_json(value: Any) -> Any:
    """Encode the types that msgspec has no form for."""
    if isinstance(value, Table):
        return value.packed()
    raise NotImplementedError(f"{type(value).__name__} is in no state")


def from_json(kind: type, value: Any) -> Any:
    """Decode the types that msgspec has no form for."""
    if issubclass(kind, Table):
        return kind.unpacked(value)
    raise NotImplementedError(f"{kind.__name__} is in no state")
