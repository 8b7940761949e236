"""Reads the state of torch's allocator; only the standard library is imported, the caller passes ``torch.cuda``.

A reading takes the allocator's lock, as each allocation of the training thread does, and calls no driver.  The peaks
of the allocator belong to the script, so they are never reset.
"""

from __future__ import annotations

from typing import Any


class DeviceMemory:
    """The memory of torch's current device.

    Args:
        cuda: ``torch.cuda``.
    """

    __slots__ = ("_cuda", "_phases", "open_phase", "positions")

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._phases: set[int] = set()  # marked phases that were read in this window
        self.open_phase = -1  #: index of the open phase whose start was read
        self.positions = 0  #: largest number of positions of a micro-batch in this window; 0 if it is not known

    def is_first(self, phase: int) -> bool:
        """Whether a phase is the first of its kind in this window: a phase of every iteration is not read each time."""
        if phase in self._phases:
            return False
        self._phases.add(phase)
        return True

    def end_window(self) -> None:
        self.positions = 0
        self._phases.clear()

    def read(self) -> tuple[float, ...] | None:
        """Return the values of `ring.MEMORY_FIELDS`; ``None`` without CUDA in this process, or during a capture.

        `memory_stats` also makes a sorted flat dictionary of several hundred names, which takes most of its time.
        """
        cuda = self._cuda
        if not cuda.is_initialized() or cuda.is_current_stream_capturing():
            return None
        known = cuda.memory_stats_as_nested_dict()
        allocated, reserved = known["allocated_bytes"]["all"], known["reserved_bytes"]["all"]
        return (
            float(allocated["current"]),
            float(allocated["peak"]),
            float(reserved["current"]),
            float(reserved["peak"]),
            float(known["inactive_split_bytes"]["all"]["current"]),
            float(known["num_alloc_retries"]),
            float(known["num_ooms"]),
            float(self.positions),
        )
