"""The constants of a job that the audit uses. No I/O."""

from __future__ import annotations

from msgspec import Struct


class KnownJob(Struct, frozen=True):
    """The constants of a job that the audit uses."""

    devices: int = 1  # GPUs, or ranks without GPUs
    peak_flops_per_s: float | None = None  # of the whole job
    flops_per_token: float | None = None
    max_positions: int = 0  # largest number of positions of a rank's iteration, if the framework fixes it; else 0
    precision: str = ""
