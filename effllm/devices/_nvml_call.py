"""Calls of NVML whose arguments are built beforehand, so that a reading costs little more than the driver does.

pynvml builds arrays and structures anew for every call; that alone took as long as the calls.  Answers are
unpacked from the memory that NVML writes, in a quarter of the time of an attribute of ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Any

import pynvml

#: What says that a GPU or its driver does not have something; what it has never heard of it calls invalid.
LACKING_CODES = frozenset({
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
})  # fmt: skip
LACKING = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission)

#: The largest numbers that are not NVML's mark for a value that is not available.
MOST_32, MOST_64 = 2**32 - 2, 2**64 - 2


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
    if number in (MOST_32 + 1, MOST_64 + 1):
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
        most: the largest that it can be, as NVML counts it.
        divisor: how many of NVML's units make one of ours.
    """

    __slots__ = ("_divisor", "_most", "_unpack", "call", "name")

    def __init__(
        self,
        name: str,
        function: str,
        handle: Any,
        *arguments: Any,
        room: Any,
        part: str = "",
        most: int = MOST_32,
        divisor: float = 1.0,
    ) -> None:
        self.name = name
        self.call = prepare(function, handle, *arguments, ctypes.byref(room))
        self._unpack = unpacker(room, part)
        self._most, self._divisor = most, divisor

    def read(self, failures: dict[str, str]) -> float | None:
        """Return the number in base units; where there is none, ``None``, and why is told."""
        code = self.call()
        (raw,) = self._unpack()
        if code == 0 and raw <= self._most:
            return raw / self._divisor
        failures[self.name] = why(code, raw)
        return None


def unpacker(room: Any, part: str = "") -> Callable[[], tuple[int]]:
    """Return what takes an unsigned number, or the member of a structure that is one, out of its memory."""
    member = getattr(type(room), part) if part else None
    offset, size = (member.offset, member.size) if member else (0, ctypes.sizeof(room))
    return partial(Struct("=I" if size == 4 else "=Q").unpack_from, room, offset)


def offered(*ways: Callable[[], Quantity]) -> Quantity | None:
    """Return the first of these ways to a number that this GPU and its driver have, even if it fails just now."""
    for way in ways:
        with suppress(pynvml.NVMLError_FunctionNotFound):
            quantity = way()
            if quantity.call() not in LACKING_CODES:
                return quantity
    return None
