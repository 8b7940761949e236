"""Measure the cost of an aggregator for a number of ranks.

Simulated ranks send real messages over real connections to a real aggregator. The results are the aggregator's
share of a core, its memory, and the time from the last report of a window to the window's values at rank 0. The
totals in the summary are compared with the sums of all reports. Ranks and aggregator share this machine, unless
--endpoint is given; then the tokens that the aggregator has confirmed are compared.

\b
Examples:
  effllm simulate --ranks 1000
  effllm simulate --ranks 10000 --minutes 5 --json
  effllm simulate --ranks 512 --interval 10 --arrival even
  effllm serve --bind 10.0.0.1:5555             # on the head node, first
  effllm simulate --ranks 4000 --endpoint 10.0.0.1:5555

Exit status: 0 all reports counted, 1 lost or unconfirmed reports or failed simulation, 2 wrong use, 130 Ctrl-C.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from effllm.commands.output import complain
from effllm.commands.simulate_run import SPREAD, Findings, SimulatedRun, Simulation, SimulationError
from effllm.config.settings import Config, read_config, secret_path
from effllm.config.switches import process_environ
from effllm.network import secret
from effllm.network.listening import num_open_files_needed, raise_open_files_limit


def main(
    ranks: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Number of simulated ranks.")],
    interval: Annotated[
        float, typer.Option(min=0.05, max=3600.0, metavar="S", help="Seconds between two reports of a rank.")
    ] = 1.0,
    minutes: Annotated[
        float, typer.Option(min=0.01, max=10_080.0, metavar="M", help="Duration of the simulation in minutes.")
    ] = 1.0,
    endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of a running aggregator. [default: a new aggregator]")
    ] = "",
    processes: Annotated[
        int, typer.Option(min=0, max=256, metavar="K", show_default=False, help="Sender processes. [default: by ranks]")
    ] = 0,
    arrival: Annotated[
        str, typer.Option(metavar="HOW", help="Reports of all ranks, in a share of the interval: burst 2 %, even 90 %.")
    ] = "burst",
    security: Annotated[str, typer.Option(metavar="HOW", help="Connections: curve with keys, none without.")] = "curve",
    run_dir: Annotated[
        str, typer.Option(metavar="FOLDER", help="Keep the run folder at this path. [default: it is deleted]")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> int:
    """Run a simulation; return 1 for lost reports or a failed simulation, 2 for wrong use, 130 after Ctrl-C."""
    for option, value, allowed in ("--arrival", arrival, (*SPREAD,)), ("--security", security, ("curve", "none")):
        if value not in allowed:
            raise typer.BadParameter(f"{value} is not one of: {', '.join(allowed)}", param_hint=option)
    address = f"tcp://{endpoint.removeprefix('tcp://')}" if endpoint else ""
    plan = Simulation(ranks, interval, minutes, address, processes, arrival, run_dir, security)
    try:
        config = read_config(process_environ())
        _check_options(plan, config)
    except ValueError as error:
        return complain("simulate", str(error), 2)
    if not plan.endpoint and (trouble := raise_open_files_limit(num_open_files_needed(plan.ranks))):
        return complain("simulate", trouble, 1)
    run = SimulatedRun(plan, config)
    result, is_stopped = run.result, False
    try:
        run.measure()
    except (SimulationError, secret.SecretError, OSError) as error:
        return complain("simulate", str(error), 1)
    except KeyboardInterrupt:
        result.status, is_stopped = "", True  # some reports may not have been counted
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if result.reports:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() if as_json else result_text(result))
    if is_stopped:
        count = f"{result.reports:,} of {plan.ranks * plan.windows:,} reports"
        return complain("simulate", f"stopped by Ctrl-C after {count}", 130)
    return 0 if result.is_exact else 1


def _check_options(plan: Simulation, config: Config) -> None:
    if plan.endpoint and plan.run_dir:
        raise ValueError("--run-dir cannot be used with --endpoint: the aggregator has a run folder")
    if plan.endpoint and plan.security == "curve" and not secret_path(config).exists():
        raise ValueError(
            f"--security curve: {secret_path(config)} does not exist; copy the aggregator's secret to this path, or "
            "set EFFICIENTLLM_SECRET_FILE"
        )
    if plan.run_dir and (Path(plan.run_dir) / "run.json").exists():
        raise ValueError(f"--run-dir {plan.run_dir} already contains a run: give another folder")


def result_text(result: Findings) -> str:
    """Return the results as lines of text; missing results are left out."""
    keys = "with keys" if result.security == "curve" else "without keys"
    lines = [
        ("ranks", f"{result.ranks:,}, one report per rank every {result.interval_s:g} s, {result.arrival}, {keys}"),
        ("joined in", f"{result.joined_s:.1f} s"),
        ("reports", f"{result.reports:,} in {result.windows:,} windows: {result.reports_per_s:,.0f}/s"),
    ]
    if result.cpu_ratio is not None and result.cpu_us_per_report is not None:
        each = f"{result.cpu_us_per_report:.0f} us per report"
        lines.append(("aggregator", f"{100 * result.cpu_ratio:.1f} % of a core, {each}"))
    if result.rss_bytes is not None:
        slope = result.rss_slope_bytes_per_s
        growth = "" if slope is None else f", {60 * slope / 2**20:+.1f} MiB a minute in the second half of the run"
        lines.append(("memory", f"{result.rss_bytes / 2**20:.0f} MiB at most{growth}"))
    if result.descriptors is not None:
        lines.append(("descriptors", f"{result.descriptors:,}"))
    if result.delays_s:
        delays = sorted(result.delays_s)
        p99 = delays[round(0.99 * (len(delays) - 1))]
        shown = f"{statistics.median(delays):.3f} s median, {p99:.3f} s 99th percentile, {delays[-1]:.3f} s maximum"
        lines.append(("delay", f"{shown}, from the last report of a window to its values at rank 0"))
    if result.status:
        lines.append(("lost", f"{result.lost:,}, unconfirmed {result.unconfirmed:,}, duplicates {result.duplicates:,}"))
    if result.status == "played":
        lines.append(("tokens", f"{result.tokens:,} of {result.tokens_true:,} confirmed"))
    elif result.status:
        lines.append(("tokens", f"{result.tokens:,} of {result.tokens_true:,}"))
        if result.energy_j is not None:
            lines.append(("energy", f"{result.energy_j:,.0f} J of {result.energy_true_j:,.0f} J"))
        lines.append(("run", result.status))
    return "\n".join(f"{name + ':':<13}{text}" for name, text in lines)
