"""The table of metrics, and the decorator that adds a metric to it."""

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
    console: str | None  # label and format of its line in the console block, for the contract's metrics
    group: str  # TensorBoard group; empty for the contract's own tags
    bases: tuple[str, ...]  # totals that it is evaluated on: run, window, job
    chart: bool  # False: a form or a part of a metric that has a chart; only in summaries
    error: Formula | None = None  # of a mean of samples: its random error, half-width, 95 %
    in_windows: bool = True  # False: another unit of a metric; only in summaries

    def tag(self, base: str) -> str:
        """Return the tag of this metric on one base, without the prefix ``efficientllm/``; each base has its own."""
        if self.group:
            return f"{self.group}/{self.name}" if base == self.bases[0] else f"{base}_{self.group}/{self.name}"
        return self.name if base == "run" else f"{base}/{self.name}"

    @property
    def run_bases(self) -> tuple[str, ...]:
        """The bases in a summary: the base window of a grouped metric becomes the run to date."""
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

    A metric of a ``group`` has the tag ``group/name`` on the first of its bases, and ``base_group/name`` on others.

    Raises:
        ValueError: the name is taken, or the function has no docstring.
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
    """Return the metric of a tag, or ``None`` if it has none."""
    return METRICS.get(tag.rpartition("/")[2])
