"""The figures that frameworks log themselves, as names of instruments' values.  This module uses only the standard
library.

A hook records a framework's figure under a name of `FIGURES`.  The aggregator compares each figure with the counts of
all ranks (effllm/job/audit).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FrameworkFigure:
    """The definition of a figure: a mean since the framework's last log, over time or over iterations.

    A hook converts a mean since the start of the training to the mean since the last log.
    """

    unit: str
    label: str
    per_device: bool = False  # whether the rate is of one GPU, or of one rank without GPUs
    per_iteration: bool = False  # whether the value is a count of one iteration, and not of one second


TOKENS_PER_S = "framework/tokens_per_second"
TOKENS_PER_S_PER_GPU = "framework/tokens_per_second_per_gpu"
SAMPLES_PER_S = "framework/samples_per_second"
TFLOPS_PER_GPU = "framework/tflops_per_gpu"
MFU_RATIO = "framework/mfu_ratio"
TOKENS_PER_ITERATION = "framework/tokens_per_iteration"

FIGURES: dict[str, FrameworkFigure] = {
    TOKENS_PER_S: FrameworkFigure("tokens/s", "tokens/s"),
    TOKENS_PER_S_PER_GPU: FrameworkFigure("tokens/s", "tokens/s per GPU", per_device=True),
    SAMPLES_PER_S: FrameworkFigure("samples/s", "samples/s"),
    TFLOPS_PER_GPU: FrameworkFigure("TFLOP/s", "TFLOP/s per GPU", per_device=True),
    MFU_RATIO: FrameworkFigure("ratio", "MFU"),
    TOKENS_PER_ITERATION: FrameworkFigure("tokens/iteration", "tokens per iteration", per_iteration=True),
}
