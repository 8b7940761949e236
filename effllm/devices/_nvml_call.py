"""Calls of NVML whose arguments are built beforehand, so that a reading costs little more than the driver does.

pynvml builds arrays and structures anew for every call; that alone took as long as the calls.  Answers are
unpacked from the memory that NVML writes, in a quarter of the time of an attribute of ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

import pynvml

#: What says that a GPU or its driver does not have something; what it has never heard of it calls invalid.
LACKING_CODES = frozenset({
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
})  # fmt: skip
LACKING = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission)

#: The largest numbers that are not NVML's mark for a value that is not available.
MAX_VALUE_32, MAX_VALUE_64 = 2**32 - 2, 2**64 - 2


def prepare(function: str, handle: Any, *arguments: Any) -> Callable[[], int]:
    """Return a call that has all that it needs; it gives NVML's return code.

    Raises:
        pynvml.NVMLError: this driver does not have the function.
    """
    try:
        return partial(getattr(pynvml.nvmlLib, function), handle, *arguments)
    except AttributeError as error:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND) from error


def repoint(handle: Any, found: Any) -> None:
    """Let a handle be another one, in every call that was prepared with it."""
    ctypes.memmove(ctypes.byref(handle), ctypes.byref(found), ctypes.sizeof(handle))


def why(code: int, number: int) -> str:
    """Return what is to be said of an answer that is no value: of its code, else of its number."""
    if code:
        return str(pynvml.NVMLError(code))
    if number in (MAX_VALUE_32 + 1, MAX_VALUE_64 + 1):
        return f"NVML gave {number:#x}, its mark for a value that is not available"
    return f"NVML gave {number}, more than can be"


class Quantity:
    """One number of a GPU: the call that gives it, and what makes base units of it.

    Args:
        name: under which its failures are told.
        function: of NVML.
        handle: the GPU's, or the slice's.
        arguments: what NVML takes before the room.
        room: where NVML puts its answer.
        part: the member of a structure that is meant.
        beside: the name of another number of the same structure, and its member; nobody is told where it is missing.
        most: the largest that it can be, as NVML counts it.
        divisor: how many of NVML's units make one of ours.
    """

    __slots__ = ("_arguments", "_function", "_handle", "beside", "call", "divisor", "most", "name", "part", "room")

    def __init__(
        self,
        name: str,
        function: str,
        handle: Any,
        *arguments: Any,
        room: Any,
        part: str = "",
        beside: tuple[str, str] | None = None,
        most: int = MAX_VALUE_32,
        divisor: float = 1.0,
    ) -> None:
        self.name, self.part, self.beside = name, part, beside
        self.most, self.divisor = most, divisor
        self._function, self._handle, self._arguments = function, handle, arguments
        self.move(room)

    def move(self, room: Any) -> None:
        """Have NVML put its answers into another room."""
        self.room = room
        self.call = prepare(self._function, self._handle, *self._arguments, ctypes.byref(room))


class _Number(NamedTuple):
    """A number in the memory of a readout."""

    offset: int
    size: int
    name: str
    call: int  # whose answer it is in
    is_told: bool
    most: int
    divisor: float


class Readout:
    """Numbers of a GPU that are read together: their calls one after the other, then all answers in one step.

    Args:
        quantities: what is read; their answers go into one memory from now on.
    """

    def __init__(self, quantities: Iterable[Quantity]) -> None:
        quantities = list(quantities)
        memory = bytearray(sum(map(_room_bytes, quantities)))
        numbers, offset = [], 0
        for place, quantity in enumerate(quantities):
            parts = [(quantity.name, quantity.part, True), *([(*quantity.beside, False)] if quantity.beside else [])]
            for name, part, is_told in parts:
                at, size = _place(quantity.room, part)
                numbers.append(_Number(offset + at, size, name, place, is_told, quantity.most, quantity.divisor))
            memory[offset : offset + ctypes.sizeof(quantity.room)] = bytes(quantity.room)  # NVML reads its version
            quantity.move(type(quantity.room).from_buffer(memory, offset))
            offset += _room_bytes(quantity)
        self._calls = [quantity.call for quantity in quantities]
        self._numbers = sorted(numbers)  # as they stand in the memory
        self._take = partial(Struct(_format(self._numbers)).unpack_from, memory)
        self._each = [(number.name, number.most, number.divisor) for number in self._numbers]
        self.names = frozenset(number.name for number in numbers)

    def read(self, failures: dict[str, str]) -> dict[str, float]:
        """Return the numbers in base units by name; of one that is missing it is told why."""
        codes = [call() for call in self._calls]
        raws = self._take()
        values = {
            name: raw / divisor for (name, most, divisor), raw in zip(self._each, raws, strict=True) if raw <= most
        }
        if any(codes) or len(values) < len(self._each):
            self._take_out(values, failures, codes, raws)
        return values

    def _take_out(
        self, values: dict[str, float], failures: dict[str, str], codes: Sequence[int], raws: Sequence[int]
    ) -> None:
        """Take out of the values what is none."""
        for number, raw in zip(self._numbers, raws, strict=True):
            code = codes[number.call]
            if code or raw > number.most:
                values.pop(number.name, None)
                if number.is_told:
                    failures[number.name] = why(code, raw)


def _room_bytes(quantity: Quantity) -> int:
    return -(-ctypes.sizeof(quantity.room) // 8) * 8  # so that each begins where its numbers may stand


def _place(room: Any, part: str) -> tuple[int, int]:
    """Return where in a room an unsigned number stands, and how many bytes it has."""
    member = getattr(type(room), part) if part else None
    return (member.offset, member.size) if member else (0, ctypes.sizeof(room))


def _format(numbers: Iterable[_Number]) -> str:
    """Return the format of unsigned numbers that stand in a memory in this order."""
    parts, end = ["="], 0
    for number in numbers:
        parts.append(f"{number.offset - end}x{'I' if number.size == 4 else 'Q'}")
        end = number.offset + number.size
    return "".join(parts)


def offered(*ways: Callable[[], Quantity]) -> Quantity | None:
    """Return the first of these ways to a number that this GPU and its driver have, even if it fails just now."""
    for way in ways:
        with suppress(pynvml.NVMLError_FunctionNotFound):
            quantity = way()
            if quantity.call() not in LACKING_CODES:
                return quantity
    return None
