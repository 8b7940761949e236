"""Counters of the kernel's perf subsystem, opened by the system call perf_event_open."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SYSCALLS = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTES_BYTES = 64  # PERF_ATTR_SIZE_VER0: type, size, config
_EVERY_PROCESS, _NO_GROUP, _CLOSE_ON_EXEC = -1, -1, 8


class PerfEvent:
    """An open counter of one CPU, over all processes; it starts at zero and does not wrap."""

    def __init__(self, kind: int, config: int, cpu: int) -> None:
        self._descriptor = _open(kind, config, cpu)

    def read(self) -> int:
        """Return the count.

        Raises:
            OSError: the counter cannot be read, or is closed.
        """
        count: int = struct.unpack("=Q", os.read(self._descriptor, 8))[0]
        return count

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open(kind: int, config: int, cpu: int) -> int:
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        raise OSError(f"the number of the system call perf_event_open is unknown on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    attributes = ctypes.create_string_buffer(struct.pack("=IIQ", kind, _ATTRIBUTES_BYTES, config), _ATTRIBUTES_BYTES)
    descriptor: int = libc.syscall(
        ctypes.c_long(number),
        attributes,
        ctypes.c_int(_EVERY_PROCESS),
        ctypes.c_int(cpu),
        ctypes.c_int(_NO_GROUP),
        ctypes.c_ulong(_CLOSE_ON_EXEC),
    )
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "perf_event_open")
    return descriptor
