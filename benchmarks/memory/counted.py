"""Count the live storages of a training step at each allocation.

The truth of the benchmark: every tensor that an operation of torch returns is seen by a dispatch mode; its storage
lives until the last reference to it is gone.  Nothing here uses effllm.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Counted:
    """The bytes of a step: held ones, and peaks of the others."""

    weights: int
    gradients: int
    states: int
    activations: int  # peak of all other storages in forward and backward
    workspace: int  # peak of all other storages in the optimizer's step
    peak: int  # of everything


@dataclass
class Storages(TorchDispatchMode):
    """Log of the storages that appear and disappear."""

    log: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        self._sizes: list[int] = []

    def __hash__(self) -> int:
        return id(self)

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; a new one is logged."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            number = len(self._sizes)
            self._numbers[key] = number
            self._sizes.append(storage.nbytes())
            self.log.append((number, storage.nbytes()))
            weakref.finalize(storage, self._gone, key, number)
        return self._numbers[key]

    def _gone(self, key: int, number: int) -> None:
        del self._numbers[key]
        self.log.append((number, -self._sizes[number]))

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self.number(leaf)
        return found

    def size(self, numbers: Iterable[int]) -> int:
        return sum(self._sizes[number] for number in numbers)


def count_step(
    model: torch.nn.Module,
    optimizer: Any,
    losses: Iterable[Callable[[], torch.Tensor]],
    ignored: Iterable[torch.Tensor],
    scales: Iterable[torch.Tensor] = (),
) -> Counted:
    """Return the bytes of a step of a model that has made a step before, so that the optimizer's states exist.

    The scales are those of quantized weights, which are not parameters.
    """
    micro_batches = list(losses)
    storages = Storages()
    weights = {storages.number(one) for one in (*model.parameters(), *scales)}
    named = [pair for state in optimizer.state.values() for pair in state.items() if torch.is_tensor(pair[1])]
    # Counters of steps, and the table of the values of 8 bits, which all states share.
    small = {storages.number(one) for name, one in named if one.dim() == 0 or name.startswith("qmap")}
    states = {storages.number(one) for _, one in named} - small
    other = {storages.number(one) for one in (*model.buffers(), *ignored)} | small
    optimizer.zero_grad(set_to_none=True)
    with storages:
        for loss in micro_batches:
            loss().backward()
        end = len(storages.log)
        gradients = {storages.number(one.grad) for one in model.parameters() if one.grad is not None}
        optimizer.step()
    held = weights | states | other
    activations = _peak(storages.log[:end], held | gradients)
    workspace = _peak(storages.log, held | gradients, end)
    return Counted(
        weights=storages.size(weights),
        gradients=storages.size(gradients),
        states=storages.size(states),
        activations=activations,
        workspace=workspace,
        peak=_peak(storages.log, other),
    )


def _peak(log: list[tuple[int, int]], without: set[int], start: int = 0) -> int:
    live = most = 0
    for at, (number, change) in enumerate(log):
        if number not in without:
            live += change
            most = max(most, live) if at >= start else most
    return most
