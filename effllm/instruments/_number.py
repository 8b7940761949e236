"""Numbers from a training script, read without a wait for a GPU."""

from __future__ import annotations

from typing import Any


def number(value: Any) -> float | None:
    """Return a number, or a tensor of one number in the host's memory, as a float.

    ``None`` for everything else: a tensor on a GPU is not read, because that waits for the GPU.
    """
    device = getattr(getattr(value, "device", None), "type", "cpu")
    if device != "cpu" or isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    except (TypeError, ValueError, RuntimeError):
        return None


def whole(value: Any) -> int | None:
    """Return a count of at least 0; ``None`` for everything else."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**53 and found == int(found) else None
