"""Run all measurements, or the named ones: ``python -m benchmarks [recorder importing ...]``."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure
from benchmarks.machine import machine

NAMES = ("recorder", "instruments", "importing", "latency", "agent", "sampling", "training", "trackers")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; all without a name")
    parser.add_argument("--keep", action="store_true", help="keep the figures in benchmarks/results/")
    given = parser.parse_args()
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; available benchmarks: {', '.join(NAMES)}")
    console = Console()
    figures: list[Figure] = []
    for name in given.names or NAMES:
        with console.status(f"measuring: {name}"):
            figures += importlib.import_module(f"benchmarks.{name}").measure()
    console.print(table(figures, "What measuring costs"))
    if given.keep:
        console.print(f"kept in {_keep(figures, '-'.join(given.names) or 'cpu')}")


def table(figures: Sequence[Figure], title: str) -> Table:
    table = Table(title=title)
    for column, justify in (("figure", "left"), ("measured", "right"), ("goal", "right"), ("", "left")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for figure in figures:
        value = f"not measured: {figure.note}" if figure.value is None else f"{figure.value:.4g} {figure.unit}"
        if figure.interval:
            value += f"\n95 %: {figure.interval[0]:.4f} to {figure.interval[1]:.4f}"
        goal = "" if figure.goal is None else f"{figure.goal:g}"
        table.add_row(figure.name, value, goal, {True: "met", False: "not met", None: ""}[figure.met])
    return table


def _keep(figures: list[Figure], name: str) -> Path:
    about = machine(gpu="none: not measured on a GPU")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{about['date']}-{name}.json"
    body = {"machine": about, "figures": [figure.to_dict() for figure in figures]}
    path.write_text(json.dumps(body, indent=2) + "\n")
    return path


if __name__ == "__main__":
    main()
