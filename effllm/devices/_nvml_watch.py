"""Events of a GPU, each reported once: critical errors (Xid), memory errors (ECC), changes of the power limit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_uint, c_ulonglong
from functools import partial
from typing import Any

import pynvml

from effllm.devices._nvml_call import MAX_VALUE_64, Quantity, Readout, offered
from effllm.records.rank import Event

#: A critical error often ends the training, so Xids are read often.  The power limit and memory errors rarely change.
XID_EVERY_S, ERRORS_EVERY_S = 1.0, 10.0
_MAX_AT_ONCE = 16


class Watch:
    """Polls the events of a GPU.

    Args:
        handle: the handle of the GPU.
        now_s: the current time.
    """

    def __init__(self, handle: Any, now_s: float) -> None:
        self._handle = handle
        self._events: Any = None
        limit = partial(Quantity, "power_limit_w", buffer=c_uint(), divisor=1e3)
        self._limit = _readout(partial(limit, "nvmlDeviceGetEnforcedPowerLimit", handle))
        errors = partial(Quantity, "ecc", buffer=c_ulonglong(), maximum=MAX_VALUE_64)
        kind, since = c_uint(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED), c_uint(pynvml.NVML_VOLATILE_ECC)
        self._errors = _readout(partial(errors, "nvmlDeviceGetTotalEccErrors", handle, kind, since))
        self.limit_w = _read(self._limit)
        self._num_errors = _read(self._errors)
        self._xid_at_s, self._errors_at_s = now_s, now_s + ERRORS_EVERY_S
        self.open()

    def open(self) -> None:
        """Register for critical errors, if NVML supports this."""
        with suppress(pynvml.NVMLError):
            self._events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._handle, pynvml.nvmlEventTypeXidCriticalError, self._events)

    def poll(self, now_s: float, is_there: bool) -> tuple[Event, ...]:
        """Return the events since the last poll.

        Args:
            now_s: the current time.
            is_there: False for a lost GPU: then only its last Xids are read, without a delay.
        """
        if now_s < self._xid_at_s and is_there:
            return ()
        self._xid_at_s = now_s + XID_EVERY_S
        events = self._critical()
        if now_s >= self._errors_at_s and is_there:
            self._errors_at_s = now_s + ERRORS_EVERY_S
            events += self._limit_changed() + self._memory_errors()
        return tuple(events)

    def close(self) -> None:
        if self._events is not None:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
            self._events = None

    def _critical(self) -> list[Event]:
        numbers: Counter[int] = Counter()
        with suppress(pynvml.NVMLError):  # a timeout means that there are no more events
            while self._events is not None and numbers.total() < _MAX_AT_ONCE:
                numbers[pynvml.nvmlEventSetWait_v2(self._events, 0).eventData] += 1
        return [
            Event(time.time(), "xid", _critical_text(number, times), count=times) for number, times in numbers.items()
        ]

    def _limit_changed(self) -> list[Event]:
        before_w, limit_w = self.limit_w, _read(self._limit)
        if limit_w is None or limit_w == before_w:
            return []
        self.limit_w = limit_w
        if not before_w:
            return []
        return [Event(time.time(), "power_limit", f"the power limit was changed from {before_w:g} W to {limit_w:g} W")]

    def _memory_errors(self) -> list[Event]:
        before, errors = self._num_errors, _read(self._errors)
        if errors is None:
            return []
        self._num_errors = errors  # NVML's count restarts at zero when the driver is loaded again
        new = int(errors - before) if before is not None else 0
        return [Event(time.time(), "ecc", f"{new} uncorrected memory errors", count=new)] if new > 0 else []


def _critical_text(number: int, times: int) -> str:
    often = f", {times} times" if times > 1 else ""
    return f"Xid {number}{often}: a critical error of the GPU, see the driver's log"


def _readout(way: Callable[[], Quantity]) -> Readout:
    quantity = offered(way)
    return Readout([quantity] if quantity else [])


def _read(readout: Readout) -> float | None:
    return next(iter(readout.read({}).values()), None)
