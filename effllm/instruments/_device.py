"""The device of an instrument: by index, by name, or the one that torch uses now."""

from __future__ import annotations

import re
import sys
from typing import Any


class UnknownDevice(ValueError):
    """The device cannot exist: its name is not ``cpu``, ``cuda`` or ``cuda:N``."""


def cuda_index(device: Any) -> int | None:
    """Return the index of a CUDA device; ``None`` if the instrument measures the process on the CPU.

    On a machine without CUDA, an instrument with an index or a CUDA name measures the process on the CPU.

    Args:
        device: an index, ``"cuda"``, ``"cuda:1"``, ``"cpu"``, a ``torch.device``, or ``None`` for the current device.

    Raises:
        UnknownDevice: the argument has another form, or CUDA has fewer devices.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if isinstance(device, bool) or (isinstance(device, int) and device < 0):
        raise UnknownDevice(f"device={device!r}: an index is 0 or more")
    match = re.fullmatch(r"(cpu)|cuda(?::(\d+))?|(\d+)", "cuda" if device is None else str(device))
    if match is None:
        raise UnknownDevice(f"device={device!r} is not an index, 'cpu', 'cuda' or 'cuda:N'")
    if match[1] or cuda is None or not cuda.is_available():
        return None
    given = match[2] or match[3]
    index = int(given) if given else int(cuda.current_device())
    if index >= (count := cuda.device_count()):
        raise UnknownDevice(f"device={device!r}: torch sees {count} CUDA devices, 0 to {count - 1}")
    return index
