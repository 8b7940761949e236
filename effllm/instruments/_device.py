"""The device of an instrument: by index, by name, or the one that torch uses now."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

from effllm.records.plain_text import one_line


class UnknownDevice(ValueError):
    """The device cannot exist: its name is not ``cpu``, ``cuda`` or ``cuda:N``."""


def cuda_index(device: Any) -> int | None:
    """Return the index of a CUDA device; ``None`` if the instrument measures the process on the CPU.

    On a machine without CUDA, an instrument with an index or a CUDA name measures the process on the CPU.

    Args:
        device: an index, ``"cuda"``, ``"cuda:1"``, ``"cpu"``, a ``torch.device``, or ``None`` for the only device with
            a context, else the current device.

    Raises:
        UnknownDevice: the argument has another form, CUDA has fewer devices, or torch cannot use CUDA in this process.
    """
    is_cpu, index = parse_device(device)
    cuda = torch_cuda()
    if is_cpu or cuda is None:
        return None
    try:
        count = int(cuda.device_count())
        if index is None:
            with_context = [index for index in range(count) if has_context(index)]
            index = with_context[0] if len(with_context) == 1 else int(cuda.current_device())
    except (RuntimeError, AssertionError) as error:  # for example in a forked process
        raise UnknownDevice(f"device={device!r}: torch cannot use CUDA in this process: {first_line(error)}") from None
    if index >= count:
        raise UnknownDevice(f"device={device!r}: torch sees {count} CUDA devices, 0 to {count - 1}")
    return index


def has_context(index: int) -> bool:
    """Whether this process uses a device; otherwise an event would make a context of hundreds of MB."""
    has_primary = getattr(getattr(sys.modules.get("torch"), "_C", None), "_cuda_hasPrimaryContext", None)
    return has_primary is None or bool(has_primary(index))


def torch_cuda() -> Any:
    """Return ``torch.cuda`` if torch is imported and has a CUDA device, else ``None``."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_available() else None


def parse_device(device: Any) -> tuple[bool, int | None]:
    """Return whether the argument names the CPU, and the index of the CUDA device; ``None`` for the current device.

    Raises:
        UnknownDevice: the argument has another form than those of `cuda_index`.
    """
    if isinstance(device, bool) or (isinstance(device, int) and device < 0):
        raise UnknownDevice(f"device={device!r}: an index is 0 or more")
    match = re.fullmatch(r"(cpu)|cuda(?::(\d+))?|(\d+)", "cuda" if device is None else str(device))
    if match is None:
        raise UnknownDevice(f"device={device!r} is not an index, 'cpu', 'cuda' or 'cuda:N'")
    given = match[2] or match[3]
    return match[1] is not None, int(given) if given else None


def first_line(error: Exception) -> str:
    """Return the first line of an error; CUDA's errors have several lines."""
    text = str(error).strip() or type(error).__name__
    return one_line(text.splitlines()[0])


_warned_devices: set[tuple[int, int]] = set()  # measured and current device


def warn_of_other_device(index: int) -> bool:
    """Warn if torch has memory only on another device than the measured one; return ``False`` if this may still change.

    Such a measured device is usually a mistake: each rank of a node was given ``device=0``. A script may also measure
    several devices in one process, so the current device alone is no reason for a warning.
    """
    cuda: Any = sys.modules["torch"].cuda
    try:
        if not cuda.is_initialized():
            return False  # `current_device` would initialize CUDA
        with_context = [index for index in range(int(cuda.device_count())) if has_context(index)]
        current = int(cuda.current_device())
        current = with_context[0] if with_context and current not in with_context else current
        if index in with_context and has_memory(cuda.memory_stats(index)):
            return True
        if current == index or current not in with_context or not has_memory(cuda.memory_stats(current)):
            return False  # torch has no memory on another device yet
    except Exception:  # noqa: BLE001 - without these statistics there is no check, and the loop must go on
        return True
    if (index, current) not in _warned_devices:
        _warned_devices.add((index, current))
        line = (
            f"cuda:{index} is measured, but torch uses cuda:{current} and has no memory on cuda:{index} in this process"
            f"; pass device={current}"
        )
        warnings.warn(line, stacklevel=4)
    return True


def has_memory(stats: Any) -> bool:
    """Whether torch's allocator has had memory on a device, from ``torch.cuda.memory_stats``."""
    return bool(stats.get("reserved_bytes.all.peak", 0))
