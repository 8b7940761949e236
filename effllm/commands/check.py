"""Check which metrics can be measured here, and by which sources.

The command tests sensors, their cost, the run folder and the settings, and compares the GPUs of the machine:
clocks, limits, links and errors. For each metric that cannot be measured, the reason and the remedy are printed.

\b
Examples:
  effllm check
  effllm check --device host
  effllm check --load                           # a slow host: load each GPU
  effllm check --json | jq .device
  srun --ntasks-per-node 1 effllm check         # on every node

Exit status: 0 a run would be measured, 1 a required part is broken, 2 wrong use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from effllm.commands.output import complain
from effllm.commands.profile import facts_table
from effllm.commands.survey import Survey, survey
from effllm.commands.survey_host import BROKEN, DIFFERS, MISSING, Finding
from effllm.config.switches import process_environ
from effllm.devices import device_names
from effllm.metrics import METRICS
from effllm.metrics.measurable import Measurable
from effllm.sensor_profile import as_text as sensor_lines

_USUAL = ("mfu_ratio", "joules_per_token")  # metrics that are always shown, in addition to the console's metrics
_MARKS = {BROKEN: "[bold red]broken[/]", MISSING: "[yellow]none[/]", DIFFERS: "[bold yellow]look[/]"}


def main(
    device: Annotated[str, typer.Option(metavar="NAME", help="Device to check. [default: EFFICIENTLLM_DEVICE]")] = "",
    show_all: Annotated[bool, typer.Option("--all", help="Show all metrics, not only the common metrics.")] = False,
    has_load: Annotated[
        bool, typer.Option("--load", help="Put each GPU under load for 5 s, unless a process uses it; needs torch.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
) -> int:
    """Print the results; return 1 if a run would not be measured or a GPU not loaded, 2 for wrong use, otherwise 0."""
    if device and device not in ("auto", *device_names()):
        names = ", ".join(("auto", *device_names()))
        return complain("check", f"--device {device}: there is no such device; available devices: {names}", 2)
    result = survey(process_environ(), device, has_load=has_load)
    if has_load and not result.gpus:
        complain("check", "--load: there is no NVIDIA GPU")
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        console = Console(highlight=False)
        for part in _output_parts(result, show_all):
            console.print(part)
    is_loaded = bool(result.gpus) and all(gpu.flops_per_second is not None for gpu in result.gpus)
    return 0 if result.measured and (is_loaded or not has_load) else 1


def _output_parts(result: Survey, show_all: bool) -> Iterator[Table | Padding | str]:
    yield _findings_table(result.findings)
    yield ""
    shown = [row for row in result.metrics if show_all or METRICS[row.metric].console or row.metric in _USUAL]
    yield _metrics_table(shown)
    yield ""
    if result.sensor:
        yield facts_table(sensor_lines(result.sensor))
        yield ""
    cost = result.cost
    if cost.read_ms is not None and cost.core_share is not None:
        cpu_share = f"One read every {cost.interval_s:g} s needs {100 * cost.core_share:.2g} % of a core per rank."
        yield f"A read of the device takes {cost.read_ms:.2f} ms. {cpu_share}"
    if result.measured:
        yield "[bold green]A run would be measured here.[/]"
    else:
        yield "[bold red]A run with these settings would not be measured here:[/]"
        for finding in result.findings:
            if finding.state == BROKEN:
                yield Padding(escape(f"{finding.name}: {_text_with_advice(finding)}"), (0, 0, 0, 2))


def _findings_table(findings: list[Finding]) -> Table:
    table = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(finding.name, _MARKS.get(finding.state, "[green]ok[/]"), escape(_text_with_advice(finding)))
    return table


def _text_with_advice(finding: Finding) -> str:
    return f"{finding.text}; {finding.advice}" if finding.advice else finding.text


def _metrics_table(metrics: list[Measurable]) -> Table:
    columns = Column(no_wrap=True, style="cyan"), Column(no_wrap=True), Column(overflow="fold")
    table = Table.grid(*columns, padding=(0, 2, 0, 0))
    shown: set[str] = set()
    for row in metrics:
        mark = "[green]yes[/]" if row.measured else "[yellow]no[/]"
        reasons = _joined_sources(row.by) if row.measured else _reasons_once(row.why_not, shown)
        table.add_row(_short_metric_name(row.metric), mark, escape("; ".join(reasons)))
    return table


def _reasons_once(reasons: list[str], shown: set[str]) -> Iterator[str]:
    """Yield the reasons why a metric is not measured; a reason that was shown before is shortened."""
    for reason in reasons:
        head, _, tail = reason.partition(": ")
        yield f"{head}: see above" if reason in shown and tail else reason
        shown.add(reason)


def _joined_sources(sources: list[str]) -> Iterator[str]:
    """Yield the sources of a metric; sources with the same text before the colon are joined."""
    merged: dict[str, list[str]] = {}
    for source in sources:
        head, _, tail = source.partition(": ")
        merged.setdefault(head, []).append(tail)
    for head, tails in merged.items():
        yield f"{head}: {', '.join(tails)}" if any(tails) else head


def _short_metric_name(name: str) -> str:
    console = METRICS[name].console
    return console.partition(" ")[0] if console else {"mfu_ratio": "MFU", "joules_per_token": "J/token"}.get(name, name)
