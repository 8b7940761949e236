"""The state of the audit, from which a restarted aggregator continues. No I/O."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from effllm.job.audit.figures import FigureSums
from effllm.job.audit.token_counts import CountSums

#: What is in doubt: inputs of metrics, as in `effllm.metrics.measurable.NEEDS`.
TOKENS, FLOPS = "tokens", "FLOPs"


class AuditState(Struct):
    """The totals that the audit compares, and its results so far."""

    counts: CountSums = msgspec.field(default_factory=CountSums)
    figures: dict[str, FigureSums] = {}  # by name of a figure
    doubts: dict[str, str] = {}  # TOKENS or FLOPS -> sentence about the failed check
    windows: int = 0  # number of windows whose counts were checked
