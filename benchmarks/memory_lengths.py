"""Draws the lengths of micro-batches of a training run: of texts of several kinds, padded, cut, packed or repeated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

#: The kinds whose lengths differ, and that have no known maximum.
VARYING = (
    "lognormal", "gamma", "chat and documents", "truncated", "packed", "bucketed", "padded", "epochs", "curriculum",
)  # fmt: skip
FIXED = "fixed"
_PACKED_AT = 4096.0
_BUCKETS = 128.0 * 2.0 ** np.arange(0, 8)
LONGEST = 8192.0  # of a sequence that nothing else cuts


class Lengths:
    """The lengths of micro-batches, padded to their longest sequence.

    Args:
        chance: draws the kind and its numbers.
        number: iterations of the run.
        kind: one of `VARYING` or `FIXED`; drawn if it is empty.
    """

    def __init__(self, chance: np.random.Generator, number: int, kind: str = "") -> None:
        self.kind = kind or str(chance.choice([FIXED, *VARYING], p=[0.15, *[0.85 / len(VARYING)] * len(VARYING)]))
        self.batch, self.micro_batches = int(chance.choice([1, 2, 8])), int(chance.choice([1, 4]))
        self._is_gamma = self.kind == "gamma" or (self.kind not in ("lognormal", "epochs") and chance.random() < 0.3)
        self._shape = float(chance.uniform(2, 6)) if self._is_gamma else float(chance.uniform(0.3, 0.8))
        self._documents = float(np.exp(chance.uniform(np.log(0.002), np.log(0.1))))  # share of long texts
        self._multiple = int(chance.choice([8, 64, 128]))
        self._fullness = float(chance.uniform(5, 100))
        cut = float(chance.choice([512, 1024, 2048, 4096]))
        self._cut = {"truncated": cut, "packed": _PACKED_AT, FIXED: _PACKED_AT}.get(self.kind, LONGEST)
        if self.kind in ("bucketed", "padded") and chance.random() < 0.5:
            self._cut = cut
        self.limit = self._cut * self.batch
        self.is_known = self.kind == FIXED or (self.kind in ("truncated", "packed") and bool(chance.random() < 0.5))
        self._epoch = max(int(number * chance.uniform(0.1, 1.0)), 2)  # iterations
        self._ramp = max(number * float(chance.uniform(0.2, 1.0)), 1.0)

    def draw(self, chance: np.random.Generator, number: int) -> Numbers:
        """Return the positions of the largest micro-batch of each iteration of a run."""
        if self.kind == "epochs":  # the samples are drawn without replacement, and other ones are together
            size = self._epoch * self.micro_batches * self.batch
            samples = self._texts(chance, (size,))
            epochs = [chance.permutation(samples) for _ in range(-(-number // self._epoch))]
            return self._padded(np.concatenate(epochs).reshape(-1, self.micro_batches * self.batch)[:number])
        texts = self._texts(chance, (number, self.micro_batches * self.batch))
        if self.kind == "curriculum":
            texts *= (0.3 + 0.7 * np.minimum(np.arange(number) / self._ramp, 1.0))[:, None]
        return self._padded(texts)

    def draw_any(self, chance: np.random.Generator, number: int) -> Numbers:
        """Return the positions of iterations with other texts, after any curriculum, neither cut nor rounded up."""
        found: Numbers = self._texts(chance, (number, self.micro_batches * self.batch)).max(axis=1) * self.batch
        return found

    def _texts(self, chance: np.random.Generator, size: tuple[int, ...]) -> Numbers:
        if self.kind == FIXED:
            return np.full(size, self._cut)
        if self.kind == "packed":
            return self._cut * (1.0 - chance.beta(1.0, self._fullness, size))
        if self._is_gamma:
            return chance.gamma(self._shape, 300, size)
        found: Numbers = chance.lognormal(6, self._shape, size)
        if self.kind == "chat and documents":
            found = np.where(chance.random(size) < self._documents, chance.lognormal(7.5, 0.5, size), found)
        return found

    def _padded(self, texts: Numbers) -> Numbers:
        longest = np.clip(np.ceil(texts.max(axis=1)), 16.0, self._cut)
        if self.kind == "bucketed":
            longest = _BUCKETS[np.minimum(np.searchsorted(_BUCKETS, longest), len(_BUCKETS) - 1)]
        elif self.kind == "padded":
            longest = np.ceil(longest / self._multiple) * self._multiple
        found: Numbers = longest * self.batch
        return found
