"""The peak of a training step: a walk through forward and backward, block by block.

Kept tensors add up during the forward pass, and are freed in the backward pass while gradients appear.  The peak is
where their sum is largest: at the loss, or at the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from effllm.memory.blocks import LayerBlock


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a step at one moment, or the peaks of its parts."""

    activations: float = 0.0
    logits: float = 0.0
    gradients: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.gradients


@dataclass(frozen=True)
class StepCourse:
    """All that a step needs beside weights and optimizer states."""

    peak: StepMemory  # at the moment of the largest sum
    activations: float  # largest sum without gradients


@dataclass(frozen=True)
class StepBlocks:
    """The parts of a step in the order of the forward pass."""

    first: LayerBlock  # the embedding, and what lives during the whole step
    layers: Sequence[Sequence[LayerBlock]]  # of one micro-batch
    final: LayerBlock | None  # the last norm with the input of the head; without the head in the last stage
    last: LayerBlock | None  # logits and loss
    input_bytes: float  # what a checkpointed layer keeps
    is_checkpointed: bool
    gradients: float  # of all trained weights of the rank
    resident: bool  # whether gradients exist during the whole step
    in_flight: int = 1  # micro-batches of a pipeline stage that wait for their backward pass


class _Walk:
    """Tracks live bytes and their peaks."""

    def __init__(self, gradients: float) -> None:
        self.live = 0.0
        self.gradients = gradients
        self.peak = StepMemory()
        self.most = 0.0

    def at(self, extra: float, logits: float = 0.0, gradient: float = 0.0) -> None:
        found = StepMemory(self.live + extra, logits, self.gradients + gradient)
        if found.total > self.peak.total:
            self.peak = found
        self.most = max(self.most, found.activations + logits)


def course_of(blocks: StepBlocks) -> StepCourse:
    """Return the peak of a step, of the last micro-batch in flight."""
    walk = _Walk(blocks.gradients if blocks.resident else 0.0)
    kept_by_layer = [_kept(layer) for layer in blocks.layers]
    once = sum(block.casts for layer in blocks.layers for block in layer)
    stored = sum(blocks.input_bytes for _ in blocks.layers) if blocks.is_checkpointed else sum(kept_by_layer) - once
    walk.live = stored * (blocks.in_flight - 1) + blocks.first.kept
    _forward(walk, blocks)
    _loss(walk, blocks)
    _backward(walk, blocks)
    if not blocks.resident:
        walk.gradients += blocks.first.gradients
    walk.at(blocks.first.backward)
    return StepCourse(walk.peak, walk.most)


def _kept(layer: Sequence[LayerBlock]) -> float:
    return sum(block.kept + block.casts for block in layer)


def _forward(walk: _Walk, blocks: StepBlocks) -> None:
    for layer in blocks.layers:
        before = walk.live
        for block in layer:
            walk.at(block.kept + block.casts + block.forward)
            walk.live += block.kept + block.casts
        if blocks.is_checkpointed:
            # The cache of autocast keeps the casts until the end of the forward pass.
            walk.live = before + blocks.input_bytes + sum(block.cached for block in layer)


def _loss(walk: _Walk, blocks: StepBlocks) -> None:
    last = blocks.last
    if last is None or blocks.final is None:
        return
    walk.at(blocks.final.kept + blocks.final.forward)
    walk.live += blocks.final.kept
    walk.at(0.0, last.kept + last.casts + last.forward)
    if blocks.is_checkpointed:
        walk.live -= sum(block.cached for layer in blocks.layers for block in layer)
    walk.at(0.0, last.kept + last.casts + last.backward)
    walk.gradients += 0.0 if blocks.resident else last.gradients
    walk.at(last.largest if blocks.resident else 0.0, last.kept / 2)
    walk.at(blocks.final.backward)
    walk.live -= blocks.final.kept


def _backward(walk: _Walk, blocks: StepBlocks) -> None:
    for layer in reversed(blocks.layers):
        if blocks.is_checkpointed:
            walk.live += _kept(layer) - blocks.input_bytes
        for block in reversed(layer):
            walk.at(block.backward + (block.largest if blocks.resident else 0.0))
            walk.gradients += 0.0 if blocks.resident else block.gradients
            walk.live -= block.kept + block.casts
