"""Example reports of a job with eight GPUs; the tests of all sinks use them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
from run_lines import totals_of

from effllm import metrics
from effllm.config.settings import Config
from effllm.records.energy import EnergyAmount
from effllm.records.forecast import REMAINING_S, Foretold
from effllm.records.job import (
    ClusterReport,
    ClusterTotals,
    Coverage,
    EnergySummary,
    JobConstants,
    Overhead,
    Summary,
    Value,
)
from effllm.records.rank import DeviceWindow, Integrals, Profile, RankReport
from effllm.records.verdict import Evidence, Straggler, Verdict
from effllm.sinks import RunInfo
from effllm.store.reader import totals_by_key

GIB = 2**30


def make_run(folder: Path | None = None, stdout: Any = None, **changes: Any) -> RunInfo:
    """Return a run whose files are in ``folder``."""
    known: dict[str, Any] = {"config": Config(), "attempt": 1, "folder": folder, "tensorboard_dir": folder}
    return RunInfo(**{**known, "stdout": io.StringIO() if stdout is None else stdout, **changes})


def make_totals(**keys: Any) -> ClusterTotals:
    """Return totals with these values; the keys are the same as in windows-*.jsonl and in the job's constants."""
    return totals_of(keys, msgspec.convert(keys, JobConstants))


def with_keys(totals: ClusterTotals, **keys: Any) -> ClusterTotals:
    """Return a copy of the totals with other values for some keys."""
    return make_totals(**{**totals_by_key(totals), **msgspec.structs.asdict(totals.constants), **keys})


def totals(iterations: int, gpus: int = 8) -> ClusterTotals:
    """Return the totals of a 7B model on ``gpus`` GPUs after this many iterations of 0.412 s."""
    time_s = 0.412 * iterations
    tokens = 65_536 * iterations
    return make_totals(
        parameters=7_000_000_000,
        iterations=iterations,
        time_s=time_s,
        slowest_step_s=0.404 * iterations,
        slowest_iterations=iterations,
        wait_s=0.02 * time_s,
        tokens=tokens,
        tokens_processed=70_000 * iterations,
        tokens_loss=60_000 * iterations,
        samples=32 * iterations,
        memory_mean_bytes=45.23 * GIB,
        memory_min_bytes=44.0 * GIB,
        memory_max_bytes=47.5 * GIB,
        memory_peak_bytes=71.3 * GIB,
        utilization_mean=0.987,
        utilization_min=0.95,
        utilization_max=0.999,
        energy_j=612.0 * gpus * time_s,
        energy_time_s=time_s,
        energy_tokens=tokens,
        energy_samples=32 * iterations,
        energy_iterations=iterations,
        energy_complete=True,
        energy_measured_j=612.0 * gpus * time_s,
        energy_gpus_j=612.0 * gpus * time_s,
        energy_error_j=612.0 * gpus * 0.005,  # energy of all GPUs in 5 ms
        energy_gain_error_j=0.05 * 612.0 * gpus * time_s,
        energy_estimated_j=0.0,
        gpus=gpus,
        world_size=gpus,
        peak_flops_per_s=989e12 * gpus,
        flops_per_token=2.05e10,
    )


def complete_totals(iterations: int = 10, gpus: int = 8) -> ClusterTotals:
    """Return totals for which every metric has a value."""
    return with_keys(
        totals(iterations, gpus),
        generated_tokens=5000,
        generation_s=2.0,
        profile=Profile(2, 0.82, 0.25, 0.09, 0.7, 0.06, {"dp": (0.2, 0.05), "all_gather": (0.08, 0.04)}),
        device_steps=iterations,
        device_step_s=0.41 * iterations,
        hardware_flops_per_token=2.4e10,
        power_limit_w=700.0 * gpus,
        power_peak_w=698.0,
        power_histogram_s={60: 9.0, 61: 0.9, 69: 0.1},
        throttled_s=0.01,
        throttle_covered_s=10.0,
        temperature_max_c=71.0,
        sm_clock_hz=1.755e9,
        sm_activity=0.81,
        tensor_activity=0.43,
        dram_activity=0.32,
        baseline_w=75.0 * gpus,
        carbon_g_per_kwh=380.0,
        pue=1.2,
        price_per_kwh=0.21,
        price_per_gpu_hour=2.5,
        elapsed_s=5.0,
        class_s={"kept": 4.0, "redone": 0.2, "restart_gap": 0.3, "startup": 0.2, "checkpoint": 0.1, "unknown": 0.2},
        class_j={
            "kept": 2000.0,
            "redone": 100.0,
            "straggling": 10.0,
            "uneven_ranks": 5.0,
            "hang": 1.0,
            "restart_gap": None,
        },
        rank_seconds=5.0 * gpus,
        overhead=Overhead(1e-4, 0.2, 0.1, 4000, 4000),
        straggling_s=0.1,
        straggling_gpu_s=0.7,
        straggling_j=210.0,
        stragglers=1,
        stalled_s=0.0,
    )


def make_report(iteration: int = 100, **changes: Any) -> ClusterReport:
    """Return the report on the ten iterations that end at ``iteration``."""
    run, last = changes.pop("run", totals(iteration)), changes.pop("last", totals(10))
    job = changes.pop("job", with_keys(run, time_s=run.loop.time_s + 60, energy_time_s=run.loop.time_s + 60))
    report = ClusterReport(
        attempt=1,
        window=iteration // 10,
        iteration=iteration,
        iteration_first=iteration - 9,
        iteration_last=iteration,
        time_s=1_700_000_000.0 + 0.412 * iteration,
        loss=3.245678,
        run=run,
        last=last,
        job=job,
        values=metrics.window_values(run, last, job),
        coverage=Coverage(8, 8, 8, 8, 0, 0, energy=1.0, memory=1.0, utilization=1.0),
        straggler=Straggler(rank=17, time_s=4.2, median_s=4.04),
        total_iterations=5000,
        forecast={REMAINING_S: Foretold(2019.0, 1990.0, 2050.0)},
        power_scope="gpu",
    )
    return msgspec.structs.replace(report, **changes)


def make_row(rank: int = 0, iteration: int = 100, **changes: Any) -> RankReport:
    """Return the report of one rank on the window that ends at ``iteration``."""
    integrals = Integrals(EnergyAmount(2521.4, 4.12), 45.23 * GIB * 4.12, 4.12, 4.07, 4.12)
    row = RankReport(
        agent=f"agent-{rank}",
        sequence=iteration // 10,
        rank=rank,
        window=iteration // 10,
        iteration_first=iteration - 9,
        iteration_last=iteration,
        iteration_shown=iteration,
        start_time_s=1_700_000_000.0,
        end_time_s=1_700_000_005.12,
        wall_s=4.12,
        busy_s=4.04,
        wait_s=0.08,
        phases_s={},
        tokens=81_920,
        tokens_processed=87_500,
        tokens_loss=75_000,
        samples=40,
        loss=3.245678,
        devices=(DeviceWindow(f"GPU-{rank:08x}", integrals, {}, 71.3 * GIB, 690.0),),
    )
    return msgspec.structs.replace(row, **changes)


def values_of(report: ClusterReport) -> dict[str, Value]:
    """Return the values of a run, with their units and errors, in the form of a summary."""
    values, errors = metrics.summary_values(report.run, report.job), metrics.errors(report.run, report.job)
    units = {tag: entry.unit for tag in values if (entry := metrics.metric_of_tag(tag))}
    return {tag: Value(value, units[tag], *errors.get(tag, (None, None))) for tag, value in values.items()}


def make_summary(status: str = "completed", **changes: Any) -> Summary:
    """Return the summary of the job after 5,000 iterations."""
    report = make_report(5000)
    summary = Summary(
        status=status,
        iterations=5000,
        attempts=2,
        parameters=7_000_000_000,
        parameters_kind="total",
        metrics=values_of(report),
        energy=EnergySummary(
            total_joules=10_085_760.0,
            measured_joules=10_085_760.0,
            error_joules=5_000.0,
            gain_error=0.05,
            scope="gpu",
            method="counter",
            joules_per_token=0.0308,
            by_class={"iterations": 9_900_000.0, "evaluation": 185_760.0, "checkpoint": None},
        ),
        coverage=report.coverage,
        overhead=Overhead(),
        started_time_s=1_700_000_000.0,
        updated_time_s=1_700_002_120.0,
        elapsed_s=2120.0,
        time_by_class={"iterations": 2060.0, "evaluation": 40.0, "startup": 20.0},
        not_measured=(
            "Inference throughput: nothing was generated.",
            "SM and tensor activity: the driver of this machine does not report them to a process without "
            "administrator's rights.",
        ),
        tokens=327_680_000,
        samples=160_000,
        measured_tokens=327_680_000,
        measured_samples=160_000,
        measured_iterations_ratio=1.0,
        loss=2.345678,
        verdict=Verdict(
            cause="data_loading",
            text="data loading: 8.0 % of GPU time, gain at most 8.7 %",
            why="data wait 33 ms of 412 ms per iteration",
            next="raise --num-workers, or put the data on faster storage",
            bound=0.087,
            confidence="high",
            evidence=(Evidence("data loading 8.0 % of GPU time", "summary.json: waterfall.parts, name data", 0.08),),
        ),
    )
    return msgspec.structs.replace(summary, **changes)
