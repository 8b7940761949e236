"""The times of the iterations of a report, as 16-bit logarithmic values. No I/O.

A value has a relative error of at most `MAX_ERROR`.  A report of more than `MAX_ITERATIONS` iterations has no times.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta, Struct

MAX_ITERATIONS = 4096
_MIN_S, _MAX_S, _CODES = 1e-6, 1e6, 65535
_EACH = (_CODES - 1) / math.log(_MAX_S / _MIN_S)  # codes per e-fold
MAX_ERROR = 0.5 / _EACH

Codes = Annotated[bytes, Meta(max_length=2 * MAX_ITERATIONS)]


class IterationTimes(Struct, frozen=True, array_like=True, gc=False):
    """The times of consecutive iterations, the last of which is the last iteration of its report."""

    steps: Codes = b""  # from the start of an iteration to its end
    waits: Codes = b""  # waits for data before the start; empty if all are 0
    own: Codes = b""  # from the start to the first wait for other ranks; empty if one is not known

    def __len__(self) -> int:
        return len(self.steps) // 2

    def is_of(self, iterations: int) -> bool:
        """Whether there is a step for each iteration, and a wait and an own time for each or for no iteration."""
        size = 2 * iterations
        return len(self.steps) == size and len(self.waits) in (0, size) and len(self.own) in (0, size)

    @classmethod
    def of(cls, steps_s: Sequence[float], waits_s: Sequence[float], own_s: Sequence[float]) -> IterationTimes | None:
        """Return the times; ``None`` for no or too many iterations.  Own times of some iterations are left out."""
        if not 0 < len(steps_s) <= MAX_ITERATIONS:
            return None
        waits = codes_of(waits_s) if any(waits_s) else b""
        return cls(codes_of(steps_s), waits, codes_of(own_s) if len(own_s) == len(steps_s) else b"")

    @classmethod
    def join(cls, parts: Sequence[IterationTimes | None], iterations: int) -> IterationTimes | None:
        """Return the times of consecutive reports; ``None`` unless each of all ``iterations`` has its times."""
        known = [part for part in parts if part]
        if not known or not sum(map(len, known)) == iterations <= MAX_ITERATIONS:
            return None
        has_own = all(part.own for part in known)
        waits = [part.waits or bytes(len(part.steps)) for part in known] if any(part.waits for part in known) else []
        own = [part.own for part in known] if has_own else []
        return cls(b"".join(part.steps for part in known), b"".join(waits), b"".join(own))


def codes_of(seconds: Iterable[float]) -> bytes:
    """Return the codes of times: 0 below a microsecond, else a logarithm."""
    codes = array("H", map(_code, seconds))
    if sys.byteorder == "big":
        codes.byteswap()
    return codes.tobytes()


def seconds_of_code(code: int) -> float:
    return _MIN_S * math.exp((code - 1) / _EACH) if code else 0.0


def _code(seconds: float) -> int:
    return 1 + round(_EACH * math.log(min(seconds, _MAX_S) / _MIN_S)) if seconds >= _MIN_S else 0
