"""The table of metrics, and the decorator that adds a metric to the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from effllm.records.job import ClusterTotals

Formula = Callable[[ClusterTotals], float | None]


@dataclass(frozen=True)
class Metric:
    """A formula with its description for all outputs."""

    name: str
    unit: str
    help: str
    formula: Formula
    console: str | None  # label and format of a line in the console block; only metrics of the contract
    group: str  # TensorBoard group; empty for metrics of the contract
    bases: tuple[str, ...]  # totals on which the metric is evaluated: run, window, job
    chart: bool  # False: no chart, because the chart of another metric has the same information
    error: Formula | None = None  # random error of a mean of samples: half-width of the 95 % interval
    in_windows: bool = True  # False: only in summaries, because another metric has the same value in another unit

    def tag(self, base: str) -> str:
        """Return the tag of this metric for one base, without the prefix ``efficientllm/``."""
        if self.group:
            return f"{self.group}/{self.name}" if base == self.bases[0] else f"{base}_{self.group}/{self.name}"
        return self.name if base == "run" else f"{base}/{self.name}"

    @property
    def run_bases(self) -> tuple[str, ...]:
        """The bases in a summary; for a metric with a group, the base window is replaced by the run to date."""
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
    """Add a formula to the table that all sinks use.

    A metric with a ``group`` has the tag ``group/name`` for the first of its bases, and ``base_group/name`` for others.

    Raises:
        ValueError: another metric has this name, or the function has no docstring.
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
    """Return the metrics of the contract, in the order of the console block."""
    return (entry for entry in METRICS.values() if entry.console)


def describe(tag: str) -> Metric | None:
    """Return the metric of a tag, or ``None`` if the tag is unknown."""
    return METRICS.get(tag.rpartition("/")[2])
