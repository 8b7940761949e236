"""Instruments in a training process return torch's values, start no threads, and import only the standard library."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from cases import cases

import effllm.instruments as instruments
from effllm.instruments import _statistics, metrics, profiling
from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker

SCRIPT = "all_instruments.py"
#: The callback needs transformers: tests/frameworks/test_energy_callback.py counts its threads, files and modules.
OF_THE_CALLBACK = {"EnergyTrackingCallback", "energy_report"}
#: What wakes the agent; the memory for records and answers needs no descriptor.
OF_A_RUN = {"socket"}


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """Return a function that uses all instruments in a process, once for each set of arguments; return its record."""
    records = {}
    with jobs.launching(tmp_path_factory.mktemp("instruments")) as launch:

        def used(*arguments):
            if arguments not in records:
                job = launch.python(SCRIPT, *arguments, device="simulated").done()
                records[arguments] = {**job.output(), "folder": job.folder}
            return records[arguments]

        yield used


KINDS = [
    pytest.param((), id="alone"),
    pytest.param(("--monitor",), id="monitor"),
    pytest.param(("--monitor", "--torch"), id="monitor and torch", marks=jobs.needs_torch),
]


@pytest.mark.parametrize("arguments", KINDS)
def test_instruments_start_no_thread(used, arguments):
    record = used(*arguments)
    threads = [state[:2] for state in record["states"].values()]

    assert threads == [record["states"]["before"][:2]] * len(threads)
    assert record["states"]["before"][0] == 1
    assert record["started"] == []  # also no thread that has ended


@pytest.mark.parametrize("arguments", KINDS)
def test_files_that_instruments_open_are_closed_when_a_call_returns(used, arguments):
    record = used(*arguments)
    before = record["states"]["before"][2]
    during = {name: files for name, (_, _, files) in record["states"].items() if name.endswith((" started", " loop"))}

    assert len(during) == 2 * ("--monitor" in arguments)
    for files in during.values():  # the run of the monitor, with the same files at the start and in the loop
        assert set(files) - set(before) == OF_A_RUN
        assert files == next(iter(during.values()))
    assert {name: files for name, (_, _, files) in record["states"].items() if files != before} == during
    assert any("profiling.json" in name for name in record["opened"])  # the opened files were seen


@pytest.mark.parametrize("arguments", KINDS)
def test_use_of_the_instruments_imports_only_the_standard_library(used, arguments):
    tops = {name.split(".")[0] for name in used(*arguments)["modules"]}

    assert "effllm" in tops
    assert tops - {"effllm"} <= sys.stdlib_module_names


def test_instruments_write_only_the_requested_files(used):
    folder = used()["folder"]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    written = {"logs/run_a.json", "logs/run_metrics.json", "profiling.json", "results.csv"}
    assert files - {"stdout.txt", "stderr.txt", "truth.json"} == written


def test_script_uses_every_instrument(used):
    """A new instrument is also to be used in the script, so that its threads, files and imports are counted."""
    script = (jobs.SCRIPTS / SCRIPT).read_text()
    names = {*profiling.__all__, *metrics.__all__, *instruments._HOMES} - {"MemoryTrend", "EnergyMetrics"}
    modules = {path.stem for path in Path(instruments.__file__).parent.glob("[!_]*.py")}
    modules -= {"performance_monitor"}  # measures the requests of a process that does not train
    found = {name.rpartition(".")[2] for name in used("--monitor")["modules"] if name.startswith("effllm.instruments.")}

    assert {name for name in names if not re.search(rf"\b{name}\b\(", script)} == OF_THE_CALLBACK & names
    assert modules - found == OF_THE_CALLBACK & modules


@pytest.mark.torch
@cases("kind", ["scalar", "with gradient", "one element", "half", "numpy scalar", "numpy array"])
def test_values_of_torch_and_numpy_are_read_without_a_warning(kind):
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    value = {
        "scalar": torch.tensor(0.5),
        "with gradient": torch.tensor(0.5, requires_grad=True),
        "one element": torch.tensor([0.5]),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "numpy scalar": numpy.float32(0.5),
        "numpy array": numpy.array([0.5]),
    }[kind]
    tracker = MetricTracker()
    tracker.update("loss", value, step=numpy.int64(3))

    assert (tracker.get_mean("loss"), tracker.last_step) == (0.5, 3)
    assert type(tracker.get_recent("loss")[0]) is float


@pytest.mark.torch
def test_rewards_and_scores_in_tensors_are_read():
    torch = pytest.importorskip("torch")
    groups, scores = GRPOMetricsTracker(), ScoreDistributionTracker()
    groups.update_group_rewards(torch.tensor([0.25, 0.75, float("nan")]))
    scores.update(torch.tensor([0.0, 0.5, 0.5]))

    assert groups.get_reward_distribution()["rank_distribution"] == {"1": 0.75, "2": 0.25}
    assert groups.get_reward_distribution()["not_finite"] == {"nan": 1}
    assert scores.get_distribution()["score_counts"] == {"0.0": 1, "0.5": 2}


@pytest.mark.torch
def test_value_of_a_tensor_without_memory_is_missing():
    torch = pytest.importorskip("torch")
    scores = ScoreDistributionTracker()
    with pytest.warns(UserWarning, match="Tensor is not a number in CPU memory"):
        scores.update(torch.empty(3, device="meta"))

    assert scores.get_distribution()["missing_count"] == 3


def test_statistics_work_in_a_child_of_a_process_that_was_adding():
    tracker = MetricTracker()
    tracker.update("loss", 1.0)
    assert _statistics._adding_lock.acquire(blocking=False)
    try:
        if (child := os.fork()) == 0:
            os._exit(tracker.get_summary("loss")["count"])
        _, status = os.waitpid(child, 0)
    finally:
        _statistics._adding_lock.release()

    assert os.waitstatus_to_exitcode(status) == 1


TRAIN = Path(__file__).parents[2] / "integration" / "instrument_panel" / "train.py"


@pytest.fixture(scope="module")
def panel(tmp_path_factory):
    """Return the folder that a run has written."""
    pytest.importorskip("torch")
    out = tmp_path_factory.mktemp("panel")
    environ = os.environ | {"OUT": str(out), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(TRAIN)], env=environ, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    return out


def read(path):
    return json.loads(path.read_text())


@pytest.mark.torch
@pytest.mark.long
def test_panel_writes_a_profile_of_each_epoch(panel):
    profiles = [read(panel / f"profiling_epoch{epoch}.json") for epoch in range(3)]

    assert [one["timing"]["iteration"]["count"] for one in profiles] == [100, 200, 300]
    for one in profiles:
        shares = [one["timing"][name]["share_of_iteration"] for name in ("forward", "backward", "optimizer")]
        assert 0.5 < sum(shares) <= 1.0
        assert 0 < one["memory"]["baseline_gb"] <= one["memory"]["peak_allocated_gb"]
        assert one["throughput"]["tokens_per_sec"] == pytest.approx(9 * one["throughput"]["samples_per_sec"])


@pytest.mark.torch
@pytest.mark.long
def test_panel_writes_metrics_and_scores_of_the_experiment(panel):
    body = read(panel / "logs" / "verifier_iter1_metrics.json")
    losses = body["raw_metrics"]["loss"]

    assert (len(losses), body["last_step"]) == (30, 290)
    assert losses[-1] < 0.7 * losses[0]
    assert body["metric_summaries"]["loss"]["mean"] == pytest.approx(sum(losses) / 30)
    assert sum(body["score_distribution"]["score_counts"].values()) == 30 * 32
    assert set(body["score_distribution"]["score_counts"]) == {"0.0", "0.5", "1.0"}
    checkpoints = [read(panel / "logs" / f"verifier_iter1_epoch{epoch}.json") for epoch in range(3)]
    assert [one["metric_summaries"]["loss"]["count"] for one in checkpoints] == [10, 20, 30]
