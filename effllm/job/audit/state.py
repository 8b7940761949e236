"""The state of the audit, from which a restarted aggregator continues. No I/O."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from effllm.job.audit.figures import FigureWindow
from effllm.job.audit.token_counts import CountSums

#: Number of the newest windows in which a framework's figure is compared.
MAX_WINDOWS = 32
#: What is in doubt: inputs of metrics, as in `effllm.metrics.measurable.NEEDS`.
TOKENS, FLOPS = "tokens", "FLOPs"


class AuditState(Struct):
    """The totals and windows that the audit compares, and its results so far."""

    counts: CountSums = msgspec.field(default_factory=CountSums)
    figures: dict[str, list[FigureWindow]] = {}  # by name of a figure, the newest last
    doubts: dict[str, str] = {}  # TOKENS or FLOPS -> sentence about the failed check
    windows: int = 0  # number of windows whose counts were checked

    def add(self, name: str, window: FigureWindow) -> None:
        """Add a framework's figure with its window; the oldest windows are dropped."""
        self.figures[name] = [*self.figures.get(name, ())[1 - MAX_WINDOWS :], window]
