"""The figures that frameworks log themselves, as names of instruments' values.  Standard library only.

A hook records a framework's figure under a name of `FIGURES`, as a mean since the framework's last log; a hook converts
a mean since the start of the training.  The aggregator compares each figure with the counts of all ranks.
"""

from __future__ import annotations

TOKENS_PER_S = "framework/tokens_per_second"
TOKENS_PER_S_PER_GPU = "framework/tokens_per_second_per_gpu"  # or of one rank without GPUs
SAMPLES_PER_S = "framework/samples_per_second"
TFLOPS_PER_GPU = "framework/tflops_per_gpu"
MFU_RATIO = "framework/mfu_ratio"
TOKENS_PER_ITERATION = "framework/tokens_per_iteration"

#: Name of a figure -> its label.
FIGURES: dict[str, str] = {
    TOKENS_PER_S: "tokens/s",
    TOKENS_PER_S_PER_GPU: "tokens/s per GPU",
    SAMPLES_PER_S: "samples/s",
    TFLOPS_PER_GPU: "TFLOP/s per GPU",
    MFU_RATIO: "MFU",
    TOKENS_PER_ITERATION: "tokens per iteration",
}
