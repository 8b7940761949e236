"""Numbers of a GPU from NVML, in base units, with the reasons for missing numbers."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pynvml

#: Codes for features that a GPU or its driver lacks.  An old driver returns "invalid argument" for a new feature.
LACKING_CODES = frozenset({
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
})  # fmt: skip
LACKING = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission)

#: The largest valid numbers; the next number is NVML's mark for an unavailable value.
MAX_VALUE_32, MAX_VALUE_64 = 2**32 - 2, 2**64 - 2


def repoint(handle: Any, new_handle: Any) -> None:
    """Overwrite a handle in place, so that every call prepared with the handle uses the device of the new handle."""
    ctypes.memmove(ctypes.byref(handle), ctypes.byref(new_handle), ctypes.sizeof(handle))


def why_invalid(number: int) -> str:
    if number in (MAX_VALUE_32 + 1, MAX_VALUE_64 + 1):
        return f"NVML returned {number:#x}, its mark for an unavailable value"
    return f"NVML returned {number}, which is above the possible maximum"


class Quantity:
    """One number of a GPU, or two of one answer: the call that returns it, and its conversion to base units.

    Args:
        function: the name of pynvml's function.
        part: the member of an answer that is a structure.
        extra: the name and the member of an extra number in the structure; its failures are not reported.
        maximum: the largest possible value, in NVML's unit.
        divisor: the number of NVML's units in one base unit.
    """

    def __init__(
        self,
        name: str,
        function: str,
        *arguments: Any,
        part: str = "",
        extra: tuple[str, str] | None = None,
        maximum: int = MAX_VALUE_32,
        divisor: float = 1.0,
    ) -> None:
        self.name, self.part, self.extra = name, part, extra
        self.maximum, self.divisor = maximum, divisor
        self.ask = partial(getattr(pynvml, function, _raise_not_found), *arguments)

    def read_into(self, values: dict[str, float], failures: dict[str, str]) -> None:
        """Add the numbers in base units to ``values``, or the reason for a missing number to ``failures``."""
        try:
            answer = self.ask()
        except pynvml.NVMLError as error:
            failures[self.name] = str(error)
            return
        number = getattr(answer, self.part) if self.part else answer
        if number <= self.maximum:
            values[self.name] = number / self.divisor
        else:
            failures[self.name] = why_invalid(number)
        if self.extra is not None:
            name, part = self.extra
            if (number := getattr(answer, part)) <= self.maximum:
                values[name] = number / self.divisor


def _raise_not_found(*_arguments: Any) -> None:
    """Stand for a function that this pynvml does not have."""
    raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def first_supported(*alternatives: Quantity) -> Quantity | None:
    """Return the first quantity whose call works, else the first that fails only at the moment, else ``None``.

    A newer call may exist and fail for good: on WSL2 nvmlDeviceGetMemoryInfo_v2 returns "unknown error".
    """
    failing = None
    for quantity in alternatives:
        try:
            quantity.ask()
        except pynvml.NVMLError as error:
            failing = failing or (quantity if error.value not in LACKING_CODES else None)
        else:
            return quantity
    return failing
