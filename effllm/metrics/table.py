"""The table of metrics: what a metric is, and the decorator that enters one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from effllm.records.job import ClusterTotals

Formula = Callable[[ClusterTotals], float | None]


@dataclass(frozen=True)
class Metric:
    """A formula with what every output needs to show it."""

    name: str
    unit: str
    help: str
    formula: Formula
    console: str | None  # label and format of its line in the block, for the contract's metrics
    group: str  # TensorBoard group; empty for the contract's own tags
    bases: tuple[str, ...]  # which totals it is shown on: run, window, job
    chart: bool  # False: another form of something that has a chart, or a part of it, for summaries alone
    error: Formula | None = None  # of a mean of samples: its random error, half-width, 95 %
    in_windows: bool = True  # False: another unit of a metric, for summaries alone

    def tag(self, base: str) -> str:
        """Return the tag, without the prefix ``efficientllm/``, of this metric on one base: no two bases have one."""
        if self.group:
            return f"{self.group}/{self.name}" if base == self.bases[0] else f"{base}_{self.group}/{self.name}"
        return self.name if base == "run" else f"{base}/{self.name}"

    @property
    def run_bases(self) -> tuple[str, ...]:
        """The bases in a summary, which has no window: what windows show is of the run to date there."""
        return tuple(
            dict.fromkeys(
                "run" if self.group and base == "window" else base
                for base in self.bases
                if self.group or base != "window"
            )
        )


METRICS: dict[str, Metric] = {}


def metric(
    unit: str,
    *,
    console: str | None = None,
    group: str = "",
    bases: Sequence[str] = ("run", "window", "job"),
    chart: bool = True,
    error: Formula | None = None,
    in_windows: bool = True,
) -> Callable[[Formula], Formula]:
    """Enter a formula into the table that every sink walks.

    A metric of a ``group`` has the tag ``group/name`` on the first of its bases, and ``base_group/name`` on others.

    Raises:
        ValueError: the name is taken, or the function explains nothing.
    """

    def enter(formula: Formula) -> Formula:
        name = formula.__name__
        if name in METRICS:
            raise ValueError(f"two metrics are named {name}")
        if not formula.__doc__:
            raise ValueError(f"metric {name} has no docstring, which is its help text")
        METRICS[name] = Metric(
            name, unit, formula.__doc__.strip(), formula, console, group, tuple(bases), chart, error, in_windows
        )
        return formula

    return enter


def headline() -> Iterable[Metric]:
    """Yield the metrics of the contract, in the order of the block."""
    return (entry for entry in METRICS.values() if entry.console)


def describe(tag: str) -> Metric | None:
    """Return the metric behind a tag, or ``None`` for a tag that is not a metric's."""
    return METRICS.get(tag.rpartition("/")[2])
