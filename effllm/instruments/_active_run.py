"""Values of instruments for the run folder, if a run is active in this process."""

from __future__ import annotations

import sys
from typing import Any


def record(name: str, value: float) -> None:
    """Record a value; without an active run, the call only reads ``sys.modules``."""
    module: Any = sys.modules.get("effllm.trainer.collector")
    if module is not None:
        module.get_metrics_collector().instruments.record(name, value)


def percentiles_of_run(name: str) -> tuple[int, list[float]] | None:
    """Return the number of values in the run so far, and their percentiles, as the agent last published them."""
    module: Any = sys.modules.get("effllm.trainer.collector")
    known: tuple[int, list[float]] | None = None
    if module is not None:
        known = module.get_metrics_collector().instruments.percentiles(name)
    return known
