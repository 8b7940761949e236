"""The times of the iterations of a report, as 16-bit logarithmic values. No I/O.

A value has a relative error of at most `MAX_ERROR`.  A report of more than `MAX_ITERATIONS` iterations has means of
several iterations.
"""

from __future__ import annotations

import math
import statistics
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta, Struct

MAX_ITERATIONS = 4096
MAX_JOINED = 16 * MAX_ITERATIONS  # joined reports of more iterations have no times
_MIN_S, _MAX_S, _MAX_CODE = 1e-6, 1e6, 65535
_CODES_PER_E_FOLD = (_MAX_CODE - 1) / math.log(_MAX_S / _MIN_S)  # a code is a logarithm of seconds
MAX_ERROR = 0.5 / _CODES_PER_E_FOLD

#: An iteration is long if it takes more than this multiple of the median.  Iterations of a healthy job differ by a
#: standard deviation of up to 0.4 (log-normal), with which 1 % of them are longer.
LONG_RATIO = 2.5

Codes = Annotated[bytes, Meta(max_length=2 * MAX_ITERATIONS)]


def which_are_long(times: Sequence[float]) -> list[bool]:
    """Return which iterations are long.

    >>> which_are_long([1, 1, 9])
    [False, False, True]
    """
    limit = LONG_RATIO * statistics.median(times) if times else 0.0
    return [time > limit for time in times]


class IterationTimes(Struct, frozen=True, array_like=True, gc=False):
    """The times of consecutive iterations, the last of which is the last iteration of its report."""

    steps: Codes = b""  # from the start of an iteration to its end
    waits: Codes = b""  # waits for data before the start; empty if all are 0
    own: Codes = b""  # from the start to the first wait for other ranks; empty if one is not known
    each: Annotated[int, Meta(ge=1, le=2**31)] = 1  # values are means of so many iterations; the last one may have less

    def __len__(self) -> int:
        return len(self.steps) // 2

    def is_complete_for(self, iterations: int) -> bool:
        """Whether there is a step for each iteration, and a wait and an own time for each or for no iteration."""
        num_bytes = 2 * -(-iterations // self.each)  # the division is rounded up
        return len(self.steps) == num_bytes and len(self.waits) in (0, num_bytes) and len(self.own) in (0, num_bytes)

    @classmethod
    def of(cls, steps_s: Sequence[float], waits_s: Sequence[float], own_s: Sequence[float]) -> IterationTimes | None:
        """Return the times; ``None`` without iterations.  Own times of some iterations are left out."""
        if not steps_s:
            return None
        each = -(-len(steps_s) // MAX_ITERATIONS)  # rounded up
        steps, waits, own = (
            codes_of(_means(seconds, each))
            for seconds in (steps_s, waits_s, own_s if len(own_s) == len(steps_s) else ())
        )
        return cls(steps, waits if any(waits) else b"", own, each)

    @classmethod
    def join(cls, parts: Sequence[tuple[IterationTimes | None, int]]) -> IterationTimes | None:
        """Return the times of consecutive reports, with their numbers of iterations; ``None`` if one has no times."""
        pairs = [(part, iterations) for part, iterations in parts if part is not None and iterations]
        total = sum(iterations for _, iterations in parts)
        has_all = sum(iterations for _, iterations in pairs) == total
        has_all = has_all and all(part.is_complete_for(iterations) for part, iterations in pairs)
        if not has_all or not 0 < total <= MAX_JOINED:
            return None
        has_own = all(part.own for part, _ in pairs)
        if total <= MAX_ITERATIONS and all(part.each == 1 for part, _ in pairs):  # 45 times as fast as with seconds
            waits = b"".join(part.waits or bytes(len(part.steps)) for part, _ in pairs)
            own_codes = b"".join(part.own for part, _ in pairs) if has_own else b""
            return cls(b"".join(part.steps for part, _ in pairs), waits if any(waits) else b"", own_codes)
        steps_s, waits_s, own_s = (
            [time_s for part, count in pairs for time_s in _times_of(getattr(part, name), count, part.each)]
            for name in ("steps", "waits", "own")
        )
        return cls.of(steps_s, waits_s, own_s if has_own else ())


def _means(seconds: Sequence[float], each: int) -> Sequence[float]:
    """Return the means of every ``each`` consecutive times; the last mean may be of fewer."""
    if each == 1:
        return seconds
    parts = (seconds[start : start + each] for start in range(0, len(seconds), each))
    return [math.fsum(part) / len(part) for part in parts]


def _times_of(codes: bytes, iterations: int, each: int) -> Sequence[float]:
    """Return a time for each iteration; 0 without codes."""
    values = array("H", codes)
    if sys.byteorder == "big":
        values.byteswap()
    if not values:
        return [0.0] * iterations
    seconds = list(map(seconds_of_code, values))
    return [seconds[iteration // each] for iteration in range(iterations)]


def codes_of(seconds: Iterable[float]) -> bytes:
    """Return the codes of times: 0 below a microsecond, else a logarithm."""
    codes = array("H", map(_code_of, seconds))
    if sys.byteorder == "big":
        codes.byteswap()
    return codes.tobytes()


def seconds_of_code(code: int) -> float:
    return _MIN_S * math.exp((code - 1) / _CODES_PER_E_FOLD) if code else 0.0


def _code_of(seconds: float) -> int:
    return 1 + round(_CODES_PER_E_FOLD * math.log(min(seconds, _MAX_S) / _MIN_S)) if seconds >= _MIN_S else 0
