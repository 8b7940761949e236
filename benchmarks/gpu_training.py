"""A training loop on this GPU, with metrics and without: equal losses, true times, profiled steps, CUDA graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figure import Figure
from benchmarks.training import ROOT

STEPS, QUICK_STEPS, GRAPH_STEPS = 200, 40, 60
PROFILE_EVERY = 20
TIMEOUT_S = 150.0
JOB = Path(__file__).resolve().parent / "gpu_job.py"
ALLOWED_DIFFERENCE = 0.02  # of a time or of an MFU, from that of the loop itself


class Seen(NamedTuple):
    """What one run of the loop has seen, and the summary and the events of its metrics."""

    loop: dict[str, Any]
    summary: dict[str, Any]
    events: list[dict[str, Any]]

    def metric(self, name: str) -> float | None:
        """Return the run's value of a metric, whose tag ends with its name."""
        found = (one["value"] for tag, one in self.summary.get("metrics", {}).items() if tag.endswith(f"/{name}"))
        return next(found, None)


def train(mode: str, steps: int, *, is_measured: bool, settings: Mapping[str, str] | None = None) -> Seen:
    """Run the loop once.

    Raises:
        RuntimeError: the loop has failed; the message has the end of its stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seen.json"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("EFFICIENTLLM_")}
        environ |= {
            "EFFICIENTLLM_METRICS_ENABLED": str(int(is_measured)),
            "EFFICIENTLLM_RUN_DIR": folder,
            "EFFICIENTLLM_DEVICE": os.environ.get("EFFICIENTLLM_DEVICE", "auto"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same sums in each run
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            **(settings or {}),
        }
        under = ["-m", "effllm", "run"] if is_measured else []
        command = [sys.executable, *under, str(JOB), mode, str(steps), str(path)]
        done = subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode or not path.exists():
            raise RuntimeError(f"the loop ended with {done.returncode}: {' '.join(done.stderr.split())[-300:]}")
        [*summaries] = Path(folder).glob("*/summary.json")
        events = [
            json.loads(line) for log in Path(folder).glob("*/events*.jsonl") for line in log.read_text().splitlines()
        ]
        return Seen(json.loads(path.read_text()), json.loads(summaries[0].read_text()) if summaries else {}, events)


def measure(steps: int, peak_flops_per_s: float | None) -> list[Figure]:
    """Compare two runs with metrics with two runs without them."""
    off, on, again, last = (train("plain", steps, is_measured=is_on) for is_on in (False, True, True, False))
    differing = sum(one != other for one, other in zip(off.loop["losses"], on.loop["losses"], strict=True))
    between = sum(one != other for one, other in zip(off.loop["losses"], last.loop["losses"], strict=True))
    detail = {"steps": len(off.loop["losses"]), "differing_between_runs_without_metrics": between}
    step_s = [one.loop["step_s"] for one in (on, again, off, last)]
    figures = [
        Figure("training: losses that differ with metrics", float(differing), "", goal=float(between), detail=detail),
        Figure(
            "training: time of a step, metrics on over off",
            sum(step_s[:2]) / sum(step_s[2:]),
            "ratio",
            detail={"on_s": step_s[:2], "off_s": step_s[2:]},
        ),
    ]
    if device_s := on.loop["device_step_s"]:
        figures.append(_ratio("device time of a step over CUDA events", on.metric("device_step_seconds"), device_s))
    if peak_flops_per_s:
        figures.append(_ratio("MFU over that of the loop", on.metric("mfu_ratio"), _mfu(on.loop, peak_flops_per_s)))
    doubts = (on.summary.get("audit") or {}).get("doubts", [])
    detail = {"doubts": doubts, "events": _texts(on)}
    return [*figures, Figure("training: doubts about its numbers", float(len(doubts)), "", 0.0, detail=detail)]


def _mfu(loop: Mapping[str, Any], peak_flops_per_s: float) -> float:
    return float(loop["flops_per_step"] / loop["step_s"] / peak_flops_per_s)


def _ratio(name: str, value: float | None, truth: float) -> Figure:
    note = "" if value is not None else "effllm has no value"
    ratio = value / truth if value is not None else None
    return Figure(f"training: {name}", ratio, "ratio", detail={"effllm": value, "loop": truth}, note=note)


def profiled() -> list[Figure]:
    """Profile every 20th step."""
    found = train("plain", 5 * PROFILE_EVERY, is_measured=True, settings=_profiling())
    profile = found.summary.get("profile") or {}
    number = float(profile.get("iterations", 0))
    return [
        Figure("profiled steps of 100", number, "", detail={"profile": profile, "events": _texts(found)}),
        Figure("time to start and stop a profile, mean", found.metric("profiling_seconds"), "s"),
    ]


def graphs() -> list[Figure]:
    """Train with CUDA graphs: one that holds the whole step, and those of torch.compile beside a profiler."""
    whole = train("captured", GRAPH_STEPS, is_measured=True)
    number = len(whole.loop["losses"])
    counted = float(whole.summary.get("iterations") or 0)
    compiled = train("compiled", GRAPH_STEPS, is_measured=True, settings=_profiling())
    return [
        Figure(
            "graph of a whole step: counted steps over replays",
            counted / number,
            "ratio",
            detail={"events": _texts(whole)},
        ),
        Figure(
            "graphs of torch.compile: counted steps over steps",
            float(compiled.summary.get("iterations") or 0) / len(compiled.loop["losses"]),
            "ratio",
            detail={"profile": compiled.summary.get("profile"), "events": _texts(compiled)},
        ),
    ]


def _profiling() -> dict[str, str]:
    return {"EFFICIENTLLM_PROFILE_EVERY": str(PROFILE_EVERY)}


def _texts(found: Seen) -> list[str]:
    return [event["text"][:200] for event in found.events][:12]
