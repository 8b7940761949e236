"""Count the live storages of torch at each operation."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):  # type: ignore[misc]
    """Numbers the storages of the tensors that operations return, and logs when they appear and disappear."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []  # the number of a storage that appears, or less than zero: that disappears
        self._sizes = [0]
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.numbers_of(one for one in tree_leaves(found) if isinstance(one, torch.Tensor))
        return found

    def numbers_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the numbers of the storages of tensors, from 1 on; new ones are logged."""
        return {self._number(one.untyped_storage()) for one in tensors}

    def _number(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._sizes)
            self.log.append(len(self._sizes))
            weakref.finalize(storage, self._gone, key)
            self._sizes.append(storage.nbytes())
        return self._numbers[key]

    def _gone(self, key: int) -> None:
        self.log.append(-self._numbers.pop(key))

    def size(self, numbers: Iterable[int]) -> int:
        """Return the bytes of storages."""
        return sum(self._sizes[number] for number in numbers)

    def live_at_peak(self, end: int, without: set[int]) -> set[int]:
        """Return the storages that live when their sum is largest, in the log before a position."""
        live = most = peak = 0
        for at, number in enumerate(self.log[:end]):
            if abs(number) not in without:
                live += self._sizes[number] if number > 0 else -self._sizes[-number]
                most, peak = max((most, peak), (live, at + 1), key=lambda one: one[0])
        return self.live(peak) - without

    def live(self, end: int) -> set[int]:
        """Return the storages that live at a position of the log."""
        found: set[int] = set()
        for number in self.log[:end]:
            found ^= {abs(number)}
        return found
