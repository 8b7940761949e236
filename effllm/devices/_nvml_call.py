"""Prepared NVML calls: their arguments are built once, so that a reading takes little more than the driver's time.

pynvml builds arrays and structures for every call, which took as long as the call itself.  Answers are unpacked from
the memory that NVML writes, which takes a quarter of the time of a ctypes attribute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

import pynvml

#: Codes for features that a GPU or its driver lacks.  An old driver returns "invalid argument" for a new feature.
LACKING_CODES = frozenset({
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
})  # fmt: skip
LACKING = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission)

#: The largest valid numbers; the next number is NVML's mark for an unavailable value.
MAX_VALUE_32, MAX_VALUE_64 = 2**32 - 2, 2**64 - 2


def prepare_call(function: str, handle: Any, *arguments: Any) -> Callable[[], int]:
    """Return a function without arguments that makes the call and returns NVML's return code."""
    try:
        return partial(getattr(pynvml.nvmlLib, function), handle, *arguments)
    except AttributeError:  # this driver does not have the function
        return lambda: int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def repoint(handle: Any, new_handle: Any) -> None:
    """Overwrite a handle in place, so that every call prepared with the handle uses the device of the new handle."""
    ctypes.memmove(ctypes.byref(handle), ctypes.byref(new_handle), ctypes.sizeof(handle))


def why_invalid(code: int, number: int) -> str:
    """Return the reason why an answer is invalid: the text of its return code, or a description of its wrong number."""
    if code:
        return str(pynvml.NVMLError(code))
    if number in (MAX_VALUE_32 + 1, MAX_VALUE_64 + 1):
        return f"NVML returned {number:#x}, its mark for an unavailable value"
    return f"NVML returned {number}, which is above the possible maximum"


class Quantity:
    """One number of a GPU: the call that returns it, and its conversion to base units.

    Args:
        name: the name in values and failures.
        function: NVML's function.
        handle: the handle of the GPU or slice.
        arguments: the call's arguments before the buffer.
        buffer: memory for NVML's answer: a number or a structure.
        part: the member of the structure.
        extra: the name and the member of an extra number in the structure; its failures are not reported.
        maximum: the largest possible value, in NVML's unit.
        divisor: the number of NVML's units in one base unit.
    """

    __slots__ = ("_arguments", "_function", "_handle", "buffer", "call", "divisor", "extra", "maximum", "name", "part")

    def __init__(
        self,
        name: str,
        function: str,
        handle: Any,
        *arguments: Any,
        buffer: Any,
        part: str = "",
        extra: tuple[str, str] | None = None,
        maximum: int = MAX_VALUE_32,
        divisor: float = 1.0,
    ) -> None:
        self.name, self.part, self.extra = name, part, extra
        self.maximum, self.divisor = maximum, divisor
        self._function, self._handle, self._arguments = function, handle, arguments
        self.use_buffer(buffer)

    def use_buffer(self, buffer: Any) -> None:
        """Prepare the call with this buffer for the answer."""
        self.buffer = buffer
        self.call = prepare_call(self._function, self._handle, *self._arguments, ctypes.byref(buffer))


class _Number(NamedTuple):
    """A number in the memory of a readout."""

    offset: int
    size: int
    name: str
    call_index: int  # of the call that returns the number
    is_reported: bool
    maximum: int
    divisor: float


class Readout:
    """Numbers of a GPU that are read together: all calls are made, then all answers are unpacked together.

    Args:
        offers: the quantities, or ``None`` if the GPU lacks one; all their answers are in one common buffer.
    """

    def __init__(self, *offers: Quantity | None) -> None:
        quantities = [quantity for quantity in offers if quantity is not None]
        memory = bytearray(sum(map(_buffer_bytes, quantities)))
        numbers, offset = [], 0
        for call_index, quantity in enumerate(quantities):
            parts = [(quantity.name, quantity.part, True), *([(*quantity.extra, False)] if quantity.extra else [])]
            for name, part, is_reported in parts:
                at, size = _offset_and_bytes(quantity.buffer, part)
                limits = quantity.maximum, quantity.divisor
                numbers.append(_Number(offset + at, size, name, call_index, is_reported, *limits))
            memory[offset : offset + ctypes.sizeof(quantity.buffer)] = bytes(quantity.buffer)  # includes a version
            quantity.use_buffer(type(quantity.buffer).from_buffer(memory, offset))
            offset += _buffer_bytes(quantity)
        self._calls = [quantity.call for quantity in quantities]
        self._numbers = sorted(numbers)  # sorted by offset, the first field of `_Number`
        self._unpack = partial(Struct(_struct_format(self._numbers)).unpack_from, memory)
        self._limits = [(number.name, number.maximum, number.divisor) for number in self._numbers]
        self.names = frozenset(number.name for number in numbers)

    def read(self, failures: dict[str, str]) -> dict[str, float]:
        """Return the numbers in base units by name; reasons for missing numbers are added to ``failures``."""
        codes = [call() for call in self._calls]
        raws = self._unpack()
        values = {
            name: raw / divisor
            for (name, maximum, divisor), raw in zip(self._limits, raws, strict=True)
            if raw <= maximum
        }
        if any(codes) or len(values) < len(self._limits):
            self._move_to_failures(values, failures, codes, raws)
        return values

    def _move_to_failures(
        self, values: dict[str, float], failures: dict[str, str], codes: Sequence[int], raws: Sequence[int]
    ) -> None:
        """Remove the numbers that are no readings; add the reasons of the reported ones to ``failures``."""
        for number, raw in zip(self._numbers, raws, strict=True):
            code = codes[number.call_index]
            if code or raw > number.maximum:
                values.pop(number.name, None)
                if number.is_reported:
                    failures[number.name] = why_invalid(code, raw)


def _buffer_bytes(quantity: Quantity) -> int:
    return -(-ctypes.sizeof(quantity.buffer) // 8) * 8  # a multiple of 8, so that each buffer is aligned


def _offset_and_bytes(buffer: Any, part: str) -> tuple[int, int]:
    """Return the offset and the size in bytes of an unsigned number in a buffer."""
    member = getattr(type(buffer), part) if part else None
    return (member.offset, member.size) if member else (0, ctypes.sizeof(buffer))


def _struct_format(numbers: Iterable[_Number]) -> str:
    parts, end = ["="], 0
    for number in numbers:
        parts.append(f"{number.offset - end}x{'I' if number.size == 4 else 'Q'}")
        end = number.offset + number.size
    return "".join(parts)


def first_supported(*alternatives: Quantity) -> Quantity | None:
    """Return the first quantity whose call works, else the first that fails only at the moment, else ``None``.

    A newer call may exist and fail for good: on WSL2 nvmlDeviceGetMemoryInfo_v2 returns "unknown error".
    """
    failing = None
    for quantity in alternatives:
        if not (code := quantity.call()):
            return quantity
        failing = failing or (quantity if code not in LACKING_CODES else None)
    return failing
