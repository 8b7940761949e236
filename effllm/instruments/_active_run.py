"""Values of instruments for the run folder, if a run is active in this process."""

from __future__ import annotations

import sys
from typing import Any

from effllm.trainer.pending_values import PENDING

#: Record a value by its name; without an active run, the call only reads one attribute.
record = PENDING.add


def percentiles_of_run(name: str) -> tuple[int, list[float]] | None:
    """Return the number of values in the run so far, and their percentiles, as the agent last published them."""
    module: Any = sys.modules.get("effllm.trainer.collector")
    known: tuple[int, list[float]] | None = None
    if module is not None:
        known = module.get_metrics_collector().instruments.percentiles(name)
    return known
