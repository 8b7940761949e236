"""The memory of a job in summary.json: the cost of allocator retries, and the state at an out-of-memory error."""

from __future__ import annotations

from msgspec import Struct


class MemoryPressureLoss(Struct, frozen=True):
    """The cost of the retries of torch's allocator: each retry frees all cached memory and waits for the device."""

    retries: int  # of all ranks
    per_iteration: float  # retries per iteration of a rank
    windows: int  # number of windows with retries
    worst_iteration: int  # end of the window with the most retries
    first_iteration: int  # end of the first window with retries
    last_iteration: int  # end of the last window with retries
    rank_seconds: float | None = None  # steps of all ranks above usual windows; None if too few windows have no retry
    max_rank_seconds: float | None = None  # upper bound: above the fastest tenth of the windows without retries


class OutOfMemory(Struct, frozen=True):
    """The memory of the ranks whose last iterations had an out-of-memory error of torch: maxima over these ranks."""

    ranks: tuple[int, ...]  # at most 16
    bytes: dict[str, float]  # allocated, reserved, fragmented; peaks of the run: steps_peak, evaluation_peak, ...
    retries: int  # of all ranks, in the whole run
    iteration: int = 0  # shown at the end of the window of the error; 0 if unknown
