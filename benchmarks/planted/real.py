"""Runs a short planted job with real processes: recorder, agents, sockets and aggregator; returns its summary.

Devices are simulated; jobs whose cause is in the GPUs (clocks, power limit, unused GPUs) use the NVML library of the
tests through the real pynvml.  A crash is a SIGKILL, a hang is a rank that sleeps, a restart starts all ranks again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.planted.job import Shape
from benchmarks.planted.reports import FLOPS_PER_TOKEN, GIB, GPU, LIMIT_W, MAX_CLOCK_HZ, REASONS, limit_w, tokens_of
from benchmarks.planted.timeline import Course, Timeline
from effllm.records.job import Summary
from tests.nvml_library import Gpu, Trace, flat

RANK = Path(__file__).with_name("rank.py")
STALL_S, END_S = 1.0, 60.0
#: NVML's bits of the clocks event reasons.
BITS = {"sw_thermal": 0x20, "hw_thermal": 0x40, "hw_slowdown": 0x8, "power_brake": 0x80, "power_cap": 0x4}
IN_GPUS = ("throttled", "power_limit", "unused_gpus")


class RealJobError(RuntimeError):
    """A real job did not end as planned."""


def run_real(found: Timeline, folder: Path, library: Path | None) -> Summary:
    """Run a job and return its summary.

    Args:
        found: the course of the job.
        folder: an empty folder.
        library: folder of the NVML library of the tests; None if it cannot be built.

    Raises:
        RealJobError: the job has no summary, or it needs the NVML library.
    """
    environ = _environment(found, folder, library)
    for course in found.attempts:
        if course.number > 1:
            time.sleep(max(course.begin_s - found.attempts[course.number - 2].end_s, 0.0))
        _run_attempt(found, course, folder, environ)
    (run,) = (folder / "runs").glob("*/summary.json")
    until_s = time.monotonic() + END_S
    while True:
        summary = msgspec.json.decode(run.read_bytes(), type=Summary)
        if summary.is_over:
            return summary
        if time.monotonic() > until_s:
            raise RealJobError(f"{found.job.name}: the job is not over {END_S:.0f} s after its end")
        time.sleep(0.05)


def _environment(found: Timeline, folder: Path, library: Path | None) -> dict[str, str]:
    shape = found.job.shape
    foreign = ("EFFICIENTLLM_", "SLURM_", "OMPI_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    settings: dict[str, Any] = {
        "DEVICE": "simulated", "COLLECTION_INTERVAL": 0.05, "LOG_INTERVAL": shape.log_interval, "SINKS": "none",
        "RUN_DIR": folder / "runs", "STALL_SECONDS": STALL_S, "PROFILE_EVERY": shape.profile_every,
        "PEAK_TFLOPS": 989, "SECRET_FILE": folder / "secret", "NODE_POWER": "none",
    }  # fmt: skip
    if any(one.cause in IN_GPUS for one in found.job.causes):
        if library is None:
            raise RealJobError(f"{found.job.name}: no C compiler, so the NVML library cannot be built")
        trace = Trace(library, folder / "trace")
        trace.write(*_gpus(found))
        environ |= trace.environment()
        settings["DEVICE"] = "nvml"
    environ |= {f"EFFICIENTLLM_{name}": str(value) for name, value in settings.items()}
    environ |= {
        "SLURM_JOB_ID": str(uuid.uuid4().int % 10**9), "SLURM_NTASKS": str(shape.ranks), "PYTHONPATH": str(Path.cwd()),
        "SLURM_STEP_TASKS_PER_NODE": str(shape.ranks), "SLURM_GPUS_ON_NODE": str(shape.ranks + found.unused),
    }  # fmt: skip
    return environ


def _gpus(found: Timeline) -> list[Gpu]:
    """Return the GPUs of the trace; the clocks of the job do not change."""
    shape, gpus = found.job.shape, []
    hot = found.job.find("throttled")
    for rank in range(shape.ranks + found.unused):
        is_used = rank < shape.ranks
        clock = float(found.clocks[rank]) if is_used else shape.clock
        is_slow = clock < 0.999 * shape.clock
        reason = "power_cap" if hot is None else REASONS[int(hot.spread * 1000) % len(REASONS)]
        gpus.append(
            Gpu(
                f"GPU-{found.job.name}-{rank}",
                f"0:0{rank + 1}:00",
                name=GPU,
                power=flat(550.0 if is_used else 70.0),
                utilization=flat(0.95 if is_used else 0.0),
                memory=flat(40.0 * GIB if is_used else 3.0 * 2**20),
                sm_clock_mhz=flat(clock * MAX_CLOCK_HZ / 1e6),
                power_limit_w=limit_w(found, rank) if is_used else LIMIT_W,
                power_limit_default_w=LIMIT_W,
                throttle=BITS[reason] if is_slow else 0,
                temperature_c=flat(88.0 if is_slow and hot is not None else 62.0),
            )
        )
    return gpus


def _run_attempt(found: Timeline, course: Course, folder: Path, environ: dict[str, str]) -> None:
    """Run the ranks of one attempt until all processes have ended."""
    ranks = found.job.shape.ranks
    meeting = folder / f"meeting-{course.number}"
    meeting.write_bytes(bytes(8 * ranks))
    plan = folder / f"plan-{course.number}.json"
    plan.write_text(json.dumps(plan_of(found, course, meeting)))
    environ = environ | {"SLURM_STEP_ID": str(course.number - 1)}
    processes = []
    with (folder / f"output-{course.number}.txt").open("wb") as output:
        for rank in range(ranks):
            own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            command = [sys.executable, str(RANK), str(plan)]
            processes.append(subprocess.Popen(command, env=environ | own, stdout=output, stderr=output, cwd=folder))
    until_s = time.monotonic() + 2 * (course.end_s - course.begin_s) + END_S
    if course.status == "stalled":
        _kill_after_the_hang(course, meeting, processes, until_s)
    try:
        for process in processes:
            process.wait(max(until_s - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
            process.wait()
        raise RealJobError(f"{found.job.name}: attempt {course.number} has not ended; see {folder}") from None


def _kill_after_the_hang(
    course: Course, meeting: Path, processes: list[subprocess.Popen[bytes]], until_s: float
) -> None:
    """Wait until the job has hung for the planned time, and kill the ranks as an operator would."""
    hung = course.first + course.hang_at
    while time.monotonic() < until_s and max(memoryview(meeting.read_bytes()).cast("q")) <= hung:
        time.sleep(0.02)
    time.sleep(course.hang_s)
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)


def plan_of(found: Timeline, course: Course, meeting: Path) -> dict[str, Any]:
    """Return what the ranks of an attempt do, for `rank.py`."""
    shape: Shape = found.job.shape
    own_s = course.own_s.copy()
    if course.status == "stalled":
        own_s[course.hang_at, course.hanging] += 1000.0  # until it is killed
    tokens = tokens_of(shape)
    return {
        "meeting": str(meeting), "ranks": shape.ranks, "first": course.first, "startup_s": course.startup_s,
        "of_rank": [
            {
                "wait_s": course.wait_s[:, rank].tolist(),
                "own_s": own_s[:, rank].tolist(),
                "kernel_s": course.kernel_s[:, rank].tolist(),
            }
            for rank in range(shape.ranks)
        ],
        "communication_s": course.communication_s.tolist(),
        "phases_s": {name: seconds.tolist() for name, seconds in course.phases_s.items()},
        "has_retry": (course.retry_s > 0).tolist(),
        "status": course.status, "profile_every": shape.profile_every, "flops_per_token": FLOPS_PER_TOKEN,
        "tokens": tokens, "processed": round(tokens / (1 - found.padding)),
    }  # fmt: skip
