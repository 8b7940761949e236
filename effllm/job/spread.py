"""Exact percentiles of a window's values over all ranks and GPUs. No I/O."""

from __future__ import annotations

import numpy as np

from effllm.job.merged import Expected, Merged
from effllm.job.rows import Rows
from effllm.records.columns import Array
from effllm.records.job import GPU_WATTS, STEP_SECONDS, UTILIZATION_RATIO, Spread


def spread_of(values: Array) -> Spread | None:
    """Return the percentiles of values; ``None`` without values.

    A percentile between two values is interpolated linearly (Hyndman and Fan's definition 7, 1996), so that the
    50th percentile is the median.
    """
    if not len(values):
        return None
    return Spread(len(values), *np.quantile(values, (0.0, 0.05, 0.5, 0.95, 1.0)).tolist())


def window_spread(rows: Rows, merged: Merged | None, expected: Expected) -> dict[str, Spread]:
    """Return the percentiles of the ranks' mean step times, and of the power and utilization of GPUs in iterations.

    Ranks without a completed iteration and GPUs that were not measured are left out.

    Args:
        rows: reports of the window.
        merged: devices of the window.
        expected: the devices that the window should have.
    """
    iterations, busy_s = rows.numbers["iterations"], rows.numbers["busy_s"]
    worked = iterations > 0
    found = {STEP_SECONDS: spread_of(busy_s[worked] / iterations[worked])}
    if merged is not None:
        at = expected.positions(merged)
        gpus = at[expected.is_gpu & (at >= 0)]
        owners = at[expected.is_gpu & expected.is_first_of_owner & (at >= 0)]  # one GPU per measured module
        found[GPU_WATTS] = spread_of(merged.mean_power_w(owners))
        found[UTILIZATION_RATIO] = spread_of(merged.mean_utilization(gpus))
    return {name: spread for name, spread in found.items() if spread is not None}
