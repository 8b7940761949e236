"""Runs short jobs with real processes: loops, agents, connections and aggregator.

Most jobs have no GPU, so shares are of rank time; some have effllm's simulated device.  Jobs whose loss is in the GPUs
use the NVML library of the tests.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.judged import devices
from benchmarks.judged.healthy import HEALTHY, RIGHT
from benchmarks.judged.job import PHASES, WAYS, Attempt, Job, calibrated, chance_of, device_seconds
from benchmarks.judged.judging import Found, judged
from benchmarks.judged.kinds import KINDS, Case, case_of
from benchmarks.judged.reports import LIMIT_W, MAX_CLOCK_HZ
from benchmarks.judged.shape import clean_job, with_usual_losses
from effllm.records.job import Summary
from tests.nvml_library import Gpu, Trace, build, flat

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("rank.py")
END_S, STALL_S = 40.0, 1.0
ATTACHED = ("ddp", "megatron")  # loops without a call at the start and at the end of an iteration
BITS = {"sw_thermal": 0x20, "hw_thermal": 0x40, "hw_slowdown": 0x8, "power_brake": 0x80, "power_cap": 0x4}
#: Frameworks that have no loop here, because this environment lacks them.
FRAMEWORKS = ("accelerate", "transformers", "trl", "lightning", "deepspeed", "torchtune", "torchtitan", "vllm")


@dataclass(frozen=True)
class Real:
    """A kind of real jobs: the planted kind, the loop, its way of attaching, and the possible numbers of ranks."""

    kind: str
    loop: str
    way: str
    ranks: tuple[int, ...] = (2, 3, 4)
    device: str = "host"
    is_busy: bool = False  # busy loops in place of sleeps
    steady: bool = False


API, BEFORE, PLAIN = "api, sync point", "api, sync point before backward", "api"
REAL_KINDS: dict[str, Real] = {
    "real_loader": Real("loader_all", "ddp", "torch, ddp", (2,)),
    "real_loader_turn": Real("loader_turn", "ddp", "torch, ddp", (2,)),
    "real_loader_one_rank": Real("loader_one_rank", "ddp", "torch, sync point", (2,)),
    "real_between": Real("between_saves", "api", API, device="simulated"),
    "real_between_rank_0": Real("between_rank_0", "api", PLAIN),
    "real_saves": Real("saves_in_iterations", "ddp", "torch, ddp", (2,)),
    "real_pauses": Real("pauses_all", "monitor", PLAIN),
    "real_pauses_turn": Real("pauses_turn", "api", API),
    "real_warmup": Real("warmup", "monitor", PLAIN),
    "real_slow": Real("slow_rank", "api", API, (3, 4, 6)),
    "real_slow_busy": Real("slow_rank_forward", "ddp", "torch, sync point", (2,), is_busy=True),
    "real_slow_third": Real("slow_third", "api", API, (2, 4)),
    "real_slow_several": Real("slow_several", "api", BEFORE, (4, 6)),
    "real_slow_megatron": Real("slow_rank", "megatron", "megatron.core", (2,)),
    "real_uneven": Real("uneven", "api", API, (3, 4)),
    "real_checkpoint": Real("checkpoint", "monitor", PLAIN),
    "real_checkpoint_rank_0": Real("checkpoint_rank_0", "api", API),
    "real_evaluation": Real("evaluation", "ddp", "torch, ddp", (2,)),
    "real_restarts": Real("restarts", "api", API, (2, 3)),
    "real_hang": Real("hang", "api", API, (2, 3)),
    "real_failed": Real("failed", "api", API, (2, 3)),
    "real_padding": Real("padding", "api", API, (1, 2)),
    "real_generation": Real("generation", "monitor", PLAIN, (1, 2)),
    "real_comm_hidden": Real("comm_hidden", "api", API),
    "real_throttled": Real("throttled_one", "api", API, device="nvml", steady=True),
    "real_limited": Real("limited_all", "api", API, (1, 2), device="nvml"),
    "real_idle_duty": Real("idle_duty", "api", PLAIN, (1, 2), device="nvml"),
    "real_unused": Real("unused_gpus", "api", API, (2, 3), device="nvml"),
    "real_healthy_api": Real(HEALTHY, "api", API, (1, 2, 4, 6)),
    "real_healthy_ddp": Real(HEALTHY, "ddp", "torch, ddp", (2,)),
    "real_healthy_megatron": Real(HEALTHY, "megatron", "megatron.core", (2,)),
}


def real_case(name: str, seed: int) -> Case:
    about, chance = REAL_KINDS[name], chance_of(name, seed)
    step_s = float(chance.uniform(0.04, 0.06) if about.loop in ATTACHED else chance.uniform(0.02, 0.04))
    job = clean_job(name, seed, chance, WAYS[about.way], about.ranks, step_s, int(5.5 / step_s), profiled=False)
    job.interval, job.attempts[0].startup_s = 10, 0.2
    if about.loop in ATTACHED:
        job.communication *= 0  # the real one of gloo
    if about.kind == HEALTHY:
        return Case(with_usual_losses(job, chance, 0.01), RIGHT, frozenset(), 0.01, 0.01)
    kind = KINDS[about.kind]
    low = kind.threshold * (2.5 if kind.is_in_own_time else 1.4)  # the times of real processes are not exact
    share = float(chance.uniform(low, max(min(4 * kind.threshold, 0.4), 1.2 * low)))
    plan = kind.plan if not about.steady else devices.low_clock("heat", False, steady=True)
    planted = plan(job, chance, share)
    if about.kind == "hang":
        planted = replace(planted, least=0.3, most=0.4)
    job = with_usual_losses(job, chance, 0.005, (*kind.without, "wait"))
    case = case_of(about.kind, planted, *calibrated(planted, job, share))
    return replace(case, right=kind.right) if kind.right == RIGHT else case  # one rank without a GPU is not `healthy`


def run_real(name: str, seed: int) -> Found | None:
    """Run a job and judge its verdict; None if this machine cannot run it."""
    about, began_s = REAL_KINDS[name], time.monotonic()
    needs = {"ddp": "torch", "megatron": "megatron.core"}.get(about.loop)
    if needs is not None and importlib.util.find_spec(needs) is None:
        return _skip(name, f"{needs} is not installed")
    if about.device == "nvml" and _library() is None:
        return _skip(name, "no C compiler")
    _name_missing()
    case = real_case(name, seed)
    with tempfile.TemporaryDirectory(prefix="effllm-judged-") as folder:
        summary = _run(case.job, about, Path(folder))
        saved_s = _restarts_s(case.job, Path(folder))
    planned_s = device_seconds(case.job) / (case.job.ranks + case.job.unused)
    saved_s = saved_s or planned_s * (1 - 1 / (1 + case.gain))
    gain = case.gain if case.job.unused else 1 / (1 - saved_s / max(summary.elapsed_s, planned_s)) - 1
    found = judged("real", name, seed, case, summary, gain, time.monotonic() - began_s)
    return found | {"kind": name}


def _restarts_s(job: Job, folder: Path) -> float:
    """Return the measured time of restarts: from the last kept iteration to the next one; 0 without a restart."""
    if len(job.attempts) == 1:
        return 0.0
    stamps: list[list[float]] = [
        json.loads((folder / f"stamps-{number}").read_text()) for number in range(len(job.attempts))
    ]
    pairs = zip(job.attempts, job.attempts[1:], stamps, stamps[1:], strict=False)
    return sum(after[0] - before[new.start - old.start] for old, new, before, after in pairs)


def _skip(name: str, reason: str) -> Found | None:
    print(f"{name} skipped: {reason}", file=sys.stderr)
    return None


@functools.lru_cache(maxsize=1)
def _name_missing() -> None:
    for one in FRAMEWORKS:
        reason = "is not installed" if importlib.util.find_spec(one) is None else "has no loop in this generator"
        print(f"no real job of {one}: it {reason}", file=sys.stderr)


@functools.lru_cache(maxsize=1)
def _library() -> Path | None:
    return build(Path(tempfile.mkdtemp(prefix="effllm-nvml-")))


# --- processes ---


def _run(job: Job, about: Real, folder: Path) -> Summary:
    environ = _environment(job, about, folder)
    for number, attempt in enumerate(job.attempts):
        time.sleep(attempt.gap_s)
        _run_attempt(job, about, attempt, folder, environ | {"SLURM_STEP_ID": str(number)}, number)
    until_s = time.monotonic() + END_S
    while True:
        for path in (folder / "runs").glob("*/summary.json"):
            summary = msgspec.json.decode(path.read_bytes(), type=Summary)
            if summary.is_over:
                return summary
        if time.monotonic() > until_s:
            outputs = "".join(path.read_text()[-600:] for path in folder.glob("output-*"))
            raise RuntimeError(f"the job has no summary: {outputs}")
        time.sleep(0.05)


def _environment(job: Job, about: Real, folder: Path) -> dict[str, str]:
    foreign = ("EFFICIENTLLM_", "SLURM_", "OMPI_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    settings: dict[str, Any] = {
        "DEVICE": about.device, "COLLECTION_INTERVAL": 0.05, "SINKS": "none", "RUN_DIR": folder / "runs",
        "STALL_SECONDS": STALL_S, "PEAK_TFLOPS": 989, "SECRET_FILE": folder / "secret", "NODE_POWER": "none",
    }  # fmt: skip
    if not job.min_window_s:
        settings["LOG_INTERVAL"] = job.interval
    if about.device == "nvml":
        library = _library()
        assert library is not None
        trace = Trace(library, folder / "trace")
        trace.write(*(_gpu(job, rank) for rank in range(job.ranks + job.unused)))
        environ |= trace.environment()
    run_id = str(uuid.uuid4().int % 10**9)
    environ |= {f"EFFICIENTLLM_{name}": str(value) for name, value in settings.items()}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'integration' / 'megatron_core'}"}
    ranks = str(job.ranks)
    if about.loop in ATTACHED:  # as under torchrun
        return environ | {"TORCHELASTIC_RUN_ID": run_id, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    gpus = str(job.ranks + job.unused)
    return environ | {
        "SLURM_JOB_ID": run_id, "SLURM_NTASKS": ranks, "SLURM_STEP_TASKS_PER_NODE": ranks, "SLURM_GPUS_ON_NODE": gpus,
    }  # fmt: skip


def _gpu(job: Job, rank: int) -> Gpu:
    """Return a GPU whose readings do not change during the job."""
    is_used = rank < job.ranks
    work_s, at = job.work, min(rank, job.ranks - 1)
    idle = float(job.idle[:, at].sum() / (work_s[:, at].sum() + job.communication.sum()))
    reasons = [name for name, share in job.reasons.items() if name in BITS and share[:, at].max() > 0.5]
    return Gpu(
        f"GPU-{job.kind}-{job.seed}-{rank}", f"0:0{rank + 1}:00", name="NVIDIA H100 80GB HBM3",
        power=flat(550.0 if is_used else 70.0), utilization=flat(1 - idle if is_used else 0.0),
        sm_clock_mhz=flat(float(job.clock[:, at].mean()) * MAX_CLOCK_HZ / 1e6),
        power_limit_w=LIMIT_W * float(job.limit[at]), power_limit_default_w=LIMIT_W,
        throttle=sum(BITS[name] for name in reasons) if is_used else 0,
        temperature_c=flat(85.0 if job.reasons else 60.0),
    )  # fmt: skip


def _run_attempt(job: Job, about: Real, one: Attempt, folder: Path, environ: dict[str, str], number: int) -> None:
    meeting, path = folder / f"meeting-{number}", folder / f"plan-{number}.json"
    meeting.write_bytes(bytes(8 * job.ranks))
    path.write_text(json.dumps(plan_of(job, about, one, meeting)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environ = environ | {"MASTER_PORT": str(free.getsockname()[1])}
    attaches = ["-m", "effllm", "run"] if about.loop in ATTACHED else []
    processes = []
    with (folder / f"output-{number}").open("wb") as output:
        for rank in range(job.ranks):
            names = ("RANK", "LOCAL_RANK") if attaches else ("SLURM_PROCID", "SLURM_LOCALID")
            own = environ | dict.fromkeys((*names, "JUDGED_RANK"), str(rank))
            command = [sys.executable, *attaches, str(RANK), str(path)]
            processes.append(subprocess.Popen(command, env=own, stdout=output, stderr=output, cwd=folder))
    until_s = time.monotonic() + 25.0 + END_S
    try:
        while any(process.poll() is None for process in processes):
            has_failed = one.status != "completed" and any(process.poll() is not None for process in processes)
            if has_failed or time.monotonic() > until_s or _is_stuck(one, meeting):
                time.sleep(one.stuck_s if one.status == "stalled" else 0.3)
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


def _is_stuck(one: Attempt, meeting: Path) -> bool:
    """Whether the ranks have reached the iteration that never ends."""
    reached = max(memoryview(meeting.read_bytes()).cast("q"))
    return one.status == "stalled" and reached > one.stop - one.start


def plan_of(job: Job, about: Real, one: Attempt, meeting: Path) -> dict[str, Any]:
    """Return what the ranks of an attempt do, for `rank.py`."""
    at = slice(one.start, one.stop)
    common = np.broadcast_to(job.communication[:, None], job.wait.shape)
    parts = {name: getattr(job, name)[at].copy() for name in ("wait", "forward", "backward", "optimizer")}
    parts |= {"communication": common[at], **{name: job.phases[name][at] for name in PHASES if name in job.phases}}
    if one.status == "stalled":  # until it is killed
        parts["forward"][-1, 0] += 1000.0
    tokens = 300
    return {
        "loop": about.loop, "meeting": str(meeting), "ranks": job.ranks, "first": one.start, "own": job.way.own,
        "startup_s": one.startup_s, "is_busy": about.is_busy, "status": one.status,
        "stamps": str(meeting.with_name(meeting.name.replace("meeting", "stamps"))),
        "phases": [name for name in PHASES if name in job.phases], "tokens": tokens,
        "processed": round(tokens / (1 - job.padding)),
        "of_rank": [{name: part[:, rank].tolist() for name, part in parts.items()} for rank in range(job.ranks)],
    }  # fmt: skip
