"""The reports of a window by rank, with their sums. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

import numpy as np

from effllm.job.joining import summed
from effllm.records.columns import Array, fields_of, structs_of
from effllm.records.counters import FIELDS
from effllm.records.rank import Allocator, Profile, RankReport, ValueStatistics, add_profiles
from effllm.records.values import merged_by_name

Name = TypeVar("Name", int, str)
Number = TypeVar("Number", int, float)


def add_to(sums: dict[Name, Number], more: Mapping[Name, Number], sign: int = 1) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0) + sign * value


class Rows(list[RankReport]):
    """The reports of a window, with their sums."""

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks, in the order of the reports."""
        return [row.rank for row in self]

    @cached_property
    def numbers(self) -> dict[str, Array]:
        """Columns of times and iterations."""
        names = (*_PLACED, "wall_s", "busy_s", "wait_s", *SUMMED)
        columns = dict(zip(names, fields_of(self, names).T, strict=True))
        columns["iterations"] = columns["iteration_last"] - columns["iteration_first"] + 1
        columns["time_s"] = columns["busy_s"] + columns["wait_s"]
        return columns

    @cached_property
    def token_counts(self) -> dict[str, list[int]]:
        """The counts of tokens of each report; a list for each count takes a quarter of the time of `fields_of`."""
        return {name: list(map(attrgetter(name), self)) for name in TOKEN_COUNTS}

    @cached_property
    def counts(self) -> dict[str, int]:
        """Exact sums of the counts."""
        others = {name: sum(map(attrgetter(name), self)) for name in _COUNTED if name not in TOKEN_COUNTS}
        return {**{name: sum(column) for name, column in self.token_counts.items()}, **others}

    @cached_property
    def iterations(self) -> int:
        """The largest number of iterations of a report."""
        return int(self.numbers["iterations"].max(initial=0.0))

    @cached_property
    def loss(self) -> float | None:
        """The loss of the first report with a loss."""
        return next((loss for loss in map(attrgetter("loss"), self) if loss is not None), None)

    @cached_property
    def first_not_finite(self) -> int | None:
        """Displayed number of the first iteration whose loss was NaN or infinite."""
        numbers = [number for number in map(attrgetter("first_not_finite"), self) if number is not None]
        return min(numbers, default=None)

    @cached_property
    def profile(self) -> Profile | None:
        return add_profiles(*map(attrgetter("profile"), self))

    @cached_property
    def values(self) -> dict[str, ValueStatistics]:
        """Statistics of the values of instruments over all ranks, by name; also of the allocator's memory."""
        values = merged_by_name(filter(None, map(attrgetter("values"), self)))
        allocators = [allocator for allocator in map(attrgetter("allocator"), self) if allocator is not None]
        for name, sizes in zip(ALLOCATOR, structs_of(allocators, Allocator).T, strict=True) if allocators else ():
            squares = float(np.square(sizes - sizes.mean()).sum())
            least, most = float(sizes.min()), float(sizes.max())
            values[f"allocator/{name}"] = ValueStatistics(len(sizes), float(sizes.sum()), squares, least, most)
        return values

    @cached_property
    def phases_s(self) -> dict[str, float]:
        """Seconds of each phase, summed over reports."""
        return summed(filter(None, map(attrgetter("phases_s"), self)))

    @cached_property
    def is_final(self) -> bool:
        """Whether a report is the last report of its rank."""
        return bool(self.numbers["final"].any())

    @cached_property
    def has_one_device_each(self) -> bool:
        return set(map(len, map(attrgetter("devices"), self))) == {1}

    def merge(self, more: Rows) -> Rows:
        """Return the sums of these reports and of ``more``, without the reports."""
        both = Rows()
        both.ranks = self.ranks + more.ranks
        both.numbers = {name: np.concatenate((column, more.numbers[name])) for name, column in self.numbers.items()}
        both.counts = {name: count + more.counts[name] for name, count in self.counts.items()}
        both.iterations = max(self.iterations, more.iterations)
        both.loss = more.loss if self.loss is None else self.loss
        both.profile = add_profiles(self.profile, more.profile)
        both.values = merged_by_name((self.values, more.values))
        both.phases_s = summed((self.phases_s, more.phases_s))
        both.is_final = self.is_final or more.is_final
        return both

    @classmethod
    def by_rank(cls, rows: Mapping[int, RankReport], everyone: list[int] | None = None) -> Rows:
        """Return reports in the order of ranks.

        Args:
            rows: the reports by rank.
            everyone: all ranks of the job; tables of ten thousand ranks recognise one list without a comparison.
        """
        ranks = everyone if everyone is not None and len(everyone) == len(rows) else sorted(rows)
        ordered = cls(map(rows.__getitem__, ranks))
        ordered.ranks = ranks
        return ordered


ALLOCATOR = Allocator.__struct_fields__
_PLACED = (
    "sequence",
    "final",
    "iteration_first",
    "iteration_last",
    "iteration_shown",
    "start_time_s",
    "end_time_s",
)
SUMMED = ("generation_s", "device_steps", "device_step_s")
#: Counts of tokens, from the largest.
TOKEN_COUNTS = ("tokens_processed", "tokens", "tokens_loss")
_COUNTED = (*FIELDS, "losses_not_finite")
