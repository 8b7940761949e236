"""``effllm simulate``: simulates the agents of a job, and measures the cost of the aggregator."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec
import typer

from effllm.commands.output import complain
from effllm.commands.simulate_run import SPREAD, Findings, SimulatedRun, Simulation, SimulationError
from effllm.config.settings import ConfigError, read_config, secret_path
from effllm.config.switches import this_process
from effllm.network import secret
from effllm.network.listening import needed, raise_limit


def main(ranks: int, interval: float, endpoint: str, arrival: str, security: str, as_json: bool, **options: Any) -> int:
    """Run a simulation; return 1 for lost reports or a failed simulation, 2 for wrong use, 130 after Ctrl-C."""
    for option, value, allowed in ("--arrival", arrival, (*SPREAD,)), ("--security", security, ("curve", "none")):
        if value not in allowed:
            raise typer.BadParameter(f"{value} is not one of: {', '.join(allowed)}", param_hint=option)
    address = f"tcp://{endpoint.removeprefix('tcp://')}" if endpoint else ""
    plan = Simulation(ranks, interval, endpoint=address, arrival=arrival, security=security, **options)
    try:
        config = read_config(this_process())
    except ConfigError as error:
        return complain("simulate", str(error), 2)
    if plan.endpoint and (plan.run_dir or (plan.security == "curve" and not secret_path(config).exists())):
        wrong = "--run-dir cannot be used with --endpoint: the aggregator has a run folder" if plan.run_dir else (
            f"--security curve: {secret_path(config)} does not exist; copy the aggregator's secret to this "
            "path, or set EFFICIENTLLM_SECRET_FILE"
        )  # fmt: skip
        return complain("simulate", wrong, 2)
    if plan.run_dir and (Path(plan.run_dir) / "run.json").exists():
        return complain("simulate", f"--run-dir {plan.run_dir} already contains a run: give another folder", 2)
    if not plan.endpoint and (trouble := raise_limit(needed(plan.ranks))):
        return complain("simulate", trouble, 1)
    run = SimulatedRun(plan, config)
    found, is_stopped = run.found, False
    try:
        run.measure()
    except (SimulationError, secret.SecretError, OSError) as error:
        return complain("simulate", str(error), 1)
    except KeyboardInterrupt:
        found.status, is_stopped = "", True  # some reports may not have been counted
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if found.reports:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if as_json else table(found))
    if is_stopped:
        count = f"{found.reports:,} of {plan.ranks * plan.windows:,} reports"
        return complain("simulate", f"stopped by Ctrl-C after {count}", 130)
    return 0 if found.is_exact else 1


def table(found: Findings) -> str:
    """Return the results as lines of text; missing results are left out."""
    keys = "with keys" if found.security == "curve" else "without keys"
    lines = [
        ("ranks", f"{found.ranks:,}, one report per rank every {found.interval_s:g} s, {found.arrival}, {keys}"),
        ("joined in", f"{found.joined_s:.1f} s"),
        ("reports", f"{found.reports:,} in {found.windows:,} windows: {found.reports_per_s:,.0f}/s"),
    ]
    if found.cpu_ratio is not None and found.cpu_us_per_report is not None:
        each = f"{found.cpu_us_per_report:.0f} us per report"
        lines.append(("aggregator", f"{100 * found.cpu_ratio:.1f} % of a core, {each}"))
    if found.rss_bytes is not None:
        slope = found.rss_slope_bytes_per_s
        growth = "" if slope is None else f", {60 * slope / 2**20:+.1f} MiB a minute in the second half of the run"
        lines.append(("memory", f"{found.rss_bytes / 2**20:.0f} MiB at most{growth}"))
    if found.descriptors is not None:
        lines.append(("descriptors", f"{found.descriptors:,}"))
    if found.delays_s:
        delays = sorted(found.delays_s)
        p99 = delays[round(0.99 * (len(delays) - 1))]
        shown = f"{statistics.median(delays):.3f} s median, {p99:.3f} s 99th percentile, {delays[-1]:.3f} s maximum"
        lines.append(("delay", f"{shown}, from the last report of a window to its values at rank 0"))
    if found.status:
        lines.append(("lost", f"{found.lost:,}, unconfirmed {found.unconfirmed:,}, duplicates {found.duplicates:,}"))
    if found.status == "played":
        lines.append(("tokens", f"{found.tokens:,} of {found.tokens_true:,} confirmed"))
    elif found.status:
        lines.append(("tokens", f"{found.tokens:,} of {found.tokens_true:,}"))
        if found.energy_j is not None:
            lines.append(("energy", f"{found.energy_j:,.0f} J of {found.energy_true_j:,.0f} J"))
        lines.append(("run", found.status))
    return "\n".join(f"{name + ':':<13}{text}" for name, text in lines)
