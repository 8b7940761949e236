"""Numbers from a training script: read without a wait for a GPU, and recorded for the folder of an active run.

A script that passes something else is warned once.
"""

from __future__ import annotations

import warnings
from typing import Any

from effllm.trainer.value_buffer import PENDING

#: Record a value by its name; without an active run, the call only reads one attribute.
record = PENDING.add_value

_TEXT = (str, bytes)  # a tuple: with cold caches, ``str | bytes`` in a call takes 3 us
#: Floats represent all whole numbers below this number.
MAX_WHOLE = 2**53
_MAX_WARNINGS = 1000


class UserWarnings:
    """Warns of each kind of mistake once: in a loop, the same mistake is made in each iteration."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def __call__(self, line: str, kind: str = "", stacklevel: int = 3) -> None:
        """Warn, by default of the caller's caller; the kind is by default the line itself."""
        if (kind or line) not in self._kinds and len(self._kinds) < _MAX_WARNINGS:
            self._kinds.add(kind or line)
            warnings.warn(line, stacklevel=stacklevel)


def number(value: Any) -> float | None:
    """Return a number, or a tensor of one number in the host's memory, as a float; ``True`` is 1.

    ``None`` for everything else: a tensor on a GPU is not read, because that waits for the GPU.
    """
    if type(value) is float:
        return value
    if value is None:
        return None  # this return avoids the exception below, which takes 2 us
    device = getattr(getattr(value, "device", None), "type", "cpu")
    if device != "cpu" or isinstance(value, _TEXT):
        return None
    try:
        # item() is used, because torch warns about float() of a loss that has a gradient, and NumPy about float() of an
        # array.
        return float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    except Exception:  # noqa: BLE001 - the value is the script's, and its loop must go on
        return None


def to_count(value: Any) -> int | None:
    """Return a count of at least 0; ``None`` for everything else."""
    count = number(value)
    return int(count) if count is not None and 0 <= count < MAX_WHOLE and count == int(count) else None


def members_of(values: Any) -> list[Any]:
    """Return the members of a list, a tensor or another iterable; a single value is its only member."""
    if isinstance(values, list):
        return values
    if isinstance(values, _TEXT):
        return [values]
    try:
        members = iter(values)
    except TypeError:
        return [values]
    return list(members)
