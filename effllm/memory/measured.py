"""The bytes of a training step that was measured with fake tensors."""

from __future__ import annotations

from typing import NamedTuple


class MeasuredStep(NamedTuple):
    """The bytes at the peak of forward and backward, and what all of the step holds."""

    weights: int  # with the scales of quantized ones
    optimizer_states: int
    gradients: int  # of all trained weights
    gradients_at_peak: int
    activations: int  # at this peak: all that is neither a weight, a state, a gradient nor a buffer
    peak: int  # of the whole step, with the optimizer's
    has_other_kernels: bool = False  # on a GPU, which need less
    notes: tuple[str, ...] = ()
