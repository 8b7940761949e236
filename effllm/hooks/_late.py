"""Numbers of tensors on a GPU, read without a wait after the GPU has computed them.

Each number is copied into pinned memory, and a CUDA event is recorded after the copy.  After this event,
usually one iteration later, the number is read.  The logic is tested with a fake event and fake memory; its cost on a
GPU was not measured.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any


def pinned(num_values: int) -> Any:
    """Return host memory that a GPU can write asynchronously."""
    torch: Any = sys.modules["torch"]
    return torch.empty(num_values, dtype=torch.int64, pin_memory=True)


def recorded_event() -> Any:
    """Return an event that happens after all work that is already queued on the current stream."""
    torch: Any = sys.modules["torch"]
    event = torch.cuda.Event()
    event.record()
    return event


class LateSums:
    """Sums of numbers; some of the numbers arrive late from a GPU.

    Args:
        num_sums: number of values in each call of `add`.
        make_buffer: returns memory for a number of values.
        make_event: returns an event; its ``query()`` does not wait, and is true if all earlier copies are done.
        devices: device types that support such memory and events.
    """

    def __init__(
        self,
        num_sums: int,
        make_buffer: Callable[[int], Any] = pinned,
        make_event: Callable[[], Any] = recorded_event,
        devices: Sequence[str] = ("cuda",),
    ) -> None:
        self._num_sums = num_sums
        self._make_buffer, self._make_event, self._devices = make_buffer, make_event, devices
        self._known = [0] * num_sums
        self._coming: deque[tuple[Any, Any]] = deque()  # event and buffer of each copy, oldest first
        self._spare: list[Any] = []

    def add(self, values: Sequence[Any]) -> bool:
        """Add numbers, or tensors of one number each, without a wait for a GPU.

        Returns:
            ``False`` if nothing is counted, because the tensors are on an accelerator without CUDA's interface.
        """
        types = [value.device.type if hasattr(value, "device") else "cpu" for value in values]
        if not set(types) <= {"cpu", *self._devices}:
            return False
        on_device = {}
        for place, (value, kind) in enumerate(zip(values, types, strict=True)):
            if kind == "cpu":
                self._known[place] += int(value)
            else:
                on_device[place] = value
        if on_device:
            self._send(on_device)
        return True

    def _send(self, on_device: dict[int, Any]) -> None:
        torch: Any = sys.modules["torch"]
        zero = torch.zeros_like(next(iter(on_device.values())))
        row = torch.stack([on_device.get(place, zero) for place in range(self._num_sums)])
        buffer = self._spare.pop() if self._spare else self._make_buffer(self._num_sums)
        buffer.copy_(row, non_blocking=True)
        self._coming.append((self._make_event(), buffer))

    def take(self) -> list[int]:
        """Return the sums of the numbers that have arrived since the last call."""
        while self._coming and self._coming[0][0].query():
            self._read()
        known, self._known = self._known, [0] * self._num_sums
        return known

    def take_rest(self) -> list[int]:
        """Wait for all numbers, and return the remaining sums; after training, this wait costs nothing."""
        while self._coming:
            self._coming[0][0].synchronize()
            self._read()
        return self.take()

    def _read(self) -> None:
        _, buffer = self._coming.popleft()
        for place, value in enumerate(buffer.tolist()):
            self._known[place] += value
        self._spare.append(buffer)


class LazyNumber:
    """A number in a tensor, read without a wait even if the tensor is on a GPU.

    Args:
        iteration: the iteration of the number.
        tensor: a tensor with one element, or a plain number.
    """

    def __init__(self, iteration: int, tensor: Any) -> None:
        self.iteration = iteration
        self._value: float | None = None
        self._copy: Any = None
        self._event: Any = None
        if getattr(tensor, "is_cuda", False):
            torch: Any = sys.modules["torch"]
            self._copy = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor.detach().reshape(-1), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        elif getattr(getattr(tensor, "device", None), "type", "cpu") == "cpu":
            self._value = float(getattr(tensor, "detach", lambda: tensor)())

    def read(self) -> float | None:
        """Return the number, or ``None`` before it has arrived."""
        if self._event is not None and self._event.query():
            self._value, self._event = float(self._copy), None
        return self._value
