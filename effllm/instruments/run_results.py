"""The measured values of a finished run, from its run folder, for a table of runs."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from effllm.store.regular_file import lines_of

MB = 2**20  # as nvidia-smi counts

#: Maximum number of bytes that are read at the end of a file of windows; a line has a few kilobytes.
_MAX_LINE_BYTES = 2**22
_NO_DEVICE = "no device is sampled: "  #: part of the agent's event about a device that cannot be opened


@dataclass
class RunResults:
    """Values by column of `results_csv.MEASURED`; a value that was not measured is ``None``."""

    values: dict[str, Any] = field(default_factory=dict)
    not_measured: list[str] = field(default_factory=list)  #: reasons, each in one line
    status: str = ""  #: status of the run: completed, failed, ...
    energy_error_j: float | None = None  #: random error of ``energy_J``, half-width of a 95 % interval
    energy_gain_error_j: float | None = None  #: error of ``energy_J`` from the gain of the sensors, half-width, 95 %
    is_simulated: bool = False  #: whether the energy belongs to simulated devices


def read_results(folder: str | Path, within_s: float = 0.0) -> RunResults:
    """Return the results of a run folder; wait up to ``within_s`` for the end of the run.

    Energy, tokens and power cover the iterations after the warm-up.  `RunResults.not_measured` has the reasons
    for missing values, also for a folder that cannot be read, and for a run that has not ended; no exception is raised.
    """
    deadline_s = time.monotonic() + within_s
    while not _has_ended(Path(folder)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    try:
        return _read(Path(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return RunResults(not_measured=[f"the run folder cannot be read: {type(error).__name__}: {error}"])


def _has_ended(folder: Path) -> bool:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return bool(json.loads((folder / "summary.json").read_bytes())["is_over"])
    return False


def _read(folder: Path) -> RunResults:
    summary = json.loads((folder / "summary.json").read_bytes())
    if not summary["is_over"]:
        return RunResults(status=summary["status"], not_measured=["the summary of the run is not complete yet"])
    totals = _last_totals(folder)
    run, job = totals["run"], totals["job"]
    results = RunResults(status=summary["status"], is_simulated=summary["simulated"])
    results.values = {
        "tokens_processed": run.get("tokens") or None,
        "wall_s": summary["elapsed_s"],
        "warmup_s": _warmup_s(folder),
        **_energy_columns(run),
        **_memory_columns(run, job, summary["coverage"]["gpus_expected"]),
    }
    if results.values.get("energy_J") is not None:
        results.energy_error_j = run.get("energy_error_j")
        results.energy_gain_error_j = run.get("energy_gain_error_j")
    if run.get("time_s") and run.get("tokens"):
        results.values["tok_per_s"] = run["tokens"] / run["time_s"]
    results.not_measured = _why_not_measured(folder, summary, run, results.values)
    return results


def _energy_columns(run: dict[str, Any]) -> dict[str, Any]:
    """Return the energy columns: means over the windows with measured energy, and joules if these are complete."""
    joules, time_s, tokens = run.get("energy_j"), run.get("energy_time_s"), run.get("energy_tokens")
    if joules is None or not time_s:
        return {}
    per_token = joules / tokens if tokens else None
    return {
        "energy_J": joules if run.get("energy_complete") else None,
        "avg_power_W": joules / time_s,
        "peak_power_W": run.get("power_peak_w"),
        "J_per_token": per_token,
        "E10k_J": None if per_token is None else 1e4 * per_token,
    }


def _memory_columns(run: dict[str, Any], job: dict[str, Any], num_gpus: int) -> dict[str, Any]:
    """Return the memory of GPUs; without GPUs the readings are the memory of processes, which is not VRAM."""
    peak, mean = job.get("memory_peak_bytes"), run.get("memory_mean_bytes")
    if not num_gpus:
        return {}
    return {"vram_peak_MB": peak / MB if peak else None, "vram_avg_MB": mean / MB if mean else None}


def _why_not_measured(folder: Path, summary: dict[str, Any], run: dict[str, Any], values: dict[str, Any]) -> list[str]:
    if not run.get("iterations"):
        return [f"the run ended during its warm-up ({summary['iterations']} iterations)"]
    reasons = []
    if values["tokens_processed"] is None:
        reasons.append("tokens: the training counted no tokens")
    # "GPU" is first: a GPU that cannot be read explains why the sensors of the host were read.
    reasons += [text for text in summary["not_measured"] if text.startswith("GPU")]
    reasons += [text for text in summary["not_measured"] if text.startswith("energy")]
    if values.get("energy_J") is None and not any(text.startswith("energy") for text in reasons):
        reasons.append(f"energy: {_no_device_event(folder) or 'a part of the iterations has no measured energy'}")
    return reasons


def _no_device_event(folder: Path) -> str:
    """Return the first event about a rank without a device, or an empty text."""
    with suppress(OSError):
        for line in lines_of(folder / "events.jsonl"):
            if _NO_DEVICE.encode() in line:
                with suppress(ValueError, KeyError, TypeError):  # the last line may be torn
                    return str(json.loads(line)["text"])
    return ""


def _last_totals(folder: Path) -> dict[str, Any]:
    """Return the last line with totals to date; a torn line of a killed writer is skipped."""
    path = _window_files(folder)[-1]
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_LINE_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        if b'"run":{' in line and b'"job":{' in line:
            with suppress(ValueError):
                document: dict[str, Any] = json.loads(line)
                return document
    raise ValueError(f"{path.name} has no totals")


def _warmup_s(folder: Path) -> float:
    """Return the iteration time of the warm-up, whose windows run-to-date values exclude."""
    seconds: dict[tuple[int, int], float] = {}  # by attempt and window: a later line corrects an earlier one
    for line in (json.loads(text) for path in _window_files(folder) for text in lines_of(path)):
        if not line.get("warming_up"):
            break
        seconds[line["attempt"], line["window"]] = line["last"]["time_s"]
    return sum(seconds.values())


def _window_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("windows-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
