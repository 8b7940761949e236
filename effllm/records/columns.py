"""Running sums of many ranks or devices in one array: one row per rank or device, one column per quantity. No I/O.

The sum over ten thousand objects of eight floats takes a hundred times as long as the sum over one array.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Positions: TypeAlias = NDArray[np.intp]
Key: TypeAlias = int | str

#: Array format in state.json: exact, and the same on every machine.
_STORED = np.dtype("<f8")


def fields_of(items: Sequence[Any], names: Sequence[str]) -> Array:
    """Return attributes of objects as an array, one row per object; ``None`` becomes nan."""
    if len(names) == 1:  # attrgetter returns no tuple
        return np.array(list(map(attrgetter(*names), items)), np.float64).reshape(-1, 1)
    return _to_array(map(attrgetter(*names), items), len(items), len(names))


def structs_of(items: Sequence[Struct], kind: type[Struct]) -> Array:
    """Return all fields of structs as an array, one row per struct; `astuple` takes half the time of `fields_of`."""
    return _to_array(map(astuple, items), len(items), len(kind.__struct_fields__))


def _to_array(rows: Iterable[tuple[Any, ...]], num_rows: int, num_columns: int) -> Array:
    rows = list(rows)
    try:
        flat = np.fromiter(chain.from_iterable(rows), np.float64, num_rows * num_columns)
    except TypeError:  # a value is None
        flat = np.array(rows, np.float64)
    return flat.reshape(num_rows, num_columns)


def means(sums: Array, covered_s: Array) -> Array:
    """Return the means over time; rows that cover no time are left out."""
    is_covered = covered_s > 0
    covered_means: Array = sums[is_covered] / covered_s[is_covered]
    return covered_means


class Table:
    """Numbers by key (row) and name (column); a new key adds a row."""

    NAMES: ClassVar[tuple[str, ...]] = ()
    NEW_ROW: ClassVar[tuple[float, ...]] = ()  # values of a new row; zeros if empty

    def __init__(self) -> None:
        self._positions: dict[Key, int] = {}  # row of each key
        self._values: Array = np.zeros((0, len(self.NAMES)))  # with unused rows at the end
        self._last_lookup: tuple[Sequence[Key], Positions] = (), np.zeros(0, np.intp)  # keys, and their rows

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def keys(self) -> Iterable[Key]:
        """All keys, in the order of their rows."""
        return self._positions.keys()

    @property
    def values(self) -> Array:
        """A view of all numbers, a row for each key."""
        return self._values[: len(self._positions)]

    def column(self, name: str) -> Array:
        return self.values[:, self.NAMES.index(name)]

    def find_or_add(self, keys: Sequence[Key]) -> Positions:
        """Return the rows of keys; a new key gets a row."""
        last_keys, positions = self._last_lookup  # the keys are usually the same in every window
        if last_keys is keys or last_keys == keys:
            return positions
        try:
            positions = np.fromiter(map(self._positions.__getitem__, keys), np.intp, len(keys))
        except KeyError:
            for key in keys:
                self._positions.setdefault(key, len(self._positions))
            self._grow(len(self._positions))
            positions = np.fromiter(map(self._positions.__getitem__, keys), np.intp, len(keys))
        self._last_lookup = keys, positions
        return positions

    def find_or_add_one(self, key: Key) -> int:
        """Return the row of one key; a new key gets a row.  No row moves, so the cache of `find_or_add` stays valid."""
        position = self._positions.get(key)
        if position is None:
            position = self._positions[key] = len(self._positions)
            self._grow(position + 1)
        return position

    def _grow(self, num_rows: int) -> None:  # doubles the array if it is too short
        if num_rows > len(self._values):
            new_rows = np.zeros((max(num_rows, 2 * len(self._values)) - len(self._values), len(self.NAMES)))
            if self.NEW_ROW:
                new_rows[:] = self.NEW_ROW
            self._values = np.concatenate((self._values, new_rows))

    def packed(self) -> dict[str, Any]:
        """Return the table as plain values for JSON."""
        return {"keys": list(self._positions), "values": np.ascontiguousarray(self.values, _STORED).tobytes()}

    @classmethod
    def unpacked(cls, stored: Mapping[str, Any]) -> Table:
        """Return the table from a result of `packed`, whose bytes JSON has stored as Base64 text.

        Raises:
            ValueError: the stored values are not a table.
        """
        table = cls()
        try:
            table.find_or_add(stored["keys"])
            table.values[:] = decode_array(stored["values"]).reshape(len(table), len(cls.NAMES))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the stored values are not a table: {error}") from error
        return table


def decode_array(text: str) -> Array:
    """Decode an array from Base64.

    Raises:
        ValueError: the text is not an array.
    """
    return np.frombuffer(base64.b64decode(text), _STORED).astype(np.float64)


def to_json(value: Any) -> Any:
    """Encode types that msgspec does not support."""
    if isinstance(value, Table):
        return value.packed()
    raise NotImplementedError(f"a state cannot contain {type(value).__name__}")


def from_json(kind: type, value: Any) -> Any:
    """Decode types that msgspec does not support."""
    if issubclass(kind, Table):
        return kind.unpacked(value)
    raise NotImplementedError(f"a state cannot contain {kind.__name__}")
