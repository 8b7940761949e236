"""What a training script declares, made into what JSON and the wire can carry; never raises."""

from __future__ import annotations

from typing import Any


def count(value: Any) -> int | None:
    """Return a count above 0, or ``None`` for what is none."""
    try:
        number = int(value)
    except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
        return None
    return number if 0 < number < 2**62 else None


def positive(value: Any) -> float | None:
    """Return a finite number above 0, or ``None`` for what is none."""
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
        return None
    return number if 0 < number < float("inf") else None


def plain(value: Any) -> Any:
    """Return a fact as JSON and the wire can carry it: as it is, or as text."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)
    return [text(one) for one in value] if isinstance(value, (list, tuple)) else text(value)


def text(value: Any) -> str:
    """Return a value as text that can be encoded."""
    try:
        shown = str(value)
    except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
        shown = f"<{type(value).__name__}>"
    return shown.encode("utf-8", "replace").decode()  # bytes of the command line that are no text are surrogates
