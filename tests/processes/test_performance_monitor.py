"""PerformanceMonitor for evaluation harnesses: it has the names of the original project, but not its errors."""

import json
import math
import os
import subprocess
import sys

import pytest
from cases import cases

from effllm import PerformanceMonitor, PerformanceMonitorContext
from effllm.instruments import performance_monitor as module
from effllm.trainer import collector as collector_module

KEYS = {"AMU", "PCU", "AL", "AEC", "MCR", "total_time", "num_requests"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Disable metrics, so that no agent starts; the last tests start agents in separate processes."""
    monkeypatch.setenv("EFFICIENTLLM_METRICS_ENABLED", "off")
    monkeypatch.setattr(collector_module, "_collector", None)


def monitor(scenario="inference", parameters=None):
    one = PerformanceMonitor()
    one.set_scenario(scenario, parameters)
    return one


TIMED = [(100, 4, 40, 1.0), (50, 2, 20, 0.25, 0.25)]  # the last two values are computation and communication times


@pytest.mark.parametrize(
    ("scenario", "parameters", "requests", "expected"),
    [
        ("inference", None, [], {"AL": math.nan, "IT": math.nan}),
        ("Inference", 1000, TIMED, {"AL": 1.5 / 2, "IT": 60 / 1.5}),
        ("pretraining", 1000, TIMED, {"AL": 1.5 / 2, "TT": 150 / 1000 / 1.5}),
        ("fine-tuning", 1000, TIMED, {"AL": 1.5 / 2, "ST": 6 / 1000 / 1.5}),
        ("pretraining", None, TIMED, {"AL": 1.5 / 2, "TT": math.nan}),
    ],
)
def test_latency_and_throughput_of_a_scenario(scenario, parameters, requests, expected):
    one = monitor(scenario, parameters)
    for request in requests:
        one.record_request(*request)

    found = one.get_metrics()
    assert found.keys() == KEYS | expected.keys()
    assert {name: found[name] for name in expected} == pytest.approx(expected, nan_ok=True)
    assert found["num_requests"] == len(requests)
    assert requests or all(math.isnan(value) for name, value in found.items() if name != "num_requests")


@pytest.mark.parametrize("request_", [(10, 1, 5), (120, 0.73)])  # the second has the latency in place of the samples
def test_latency_of_a_request_without_a_time_is_nan(recwarn, request_):
    one = monitor()
    one.record_request(*request_)

    assert math.isnan(one.get_metrics()["AL"])
    warned = [str(warning.message) for warning in recwarn]
    assert len(warned) == (len(request_) == 2)
    assert all("a count or a time that is not a number" in line for line in warned)
    assert (one.get_metrics()["num_requests"], one._samples) == (1, len(request_) == 3)
    assert len(request_) == 2 or one.get_metrics()["IT"] > 0


def test_unknown_scenario_is_rejected():
    with pytest.raises(ValueError, match="'cooking' is unknown; available scenarios: pretraining"):
        monitor("cooking")


@cases("bad", [float("nan"), -1, "x", None, [1]])
def test_invalid_numbers_never_raise_an_exception(bad):
    one = monitor()
    with pytest.warns(UserWarning):
        one.record_request(bad, bad, bad, bad, bad)

    assert one.get_metrics()["num_requests"] == 1


def test_compression_score_is_size_ratio_times_performance_ratio():
    one = monitor()
    assert math.isnan(one.get_metrics()["MCR"])

    one.set_compression_info(16.0, 4.0, 0.8, 0.6)

    assert one.get_metrics()["MCR"] == pytest.approx(3.0)  # 4 * 0.75
    one.set_compression_info(16.0, 0.0, 0.8, 0.6)
    assert math.isnan(one.get_metrics()["MCR"])


def test_memory_does_not_grow_with_requests(monkeypatch):
    monkeypatch.setattr(module, "record_request", lambda *_, **__: None)
    one = monitor()
    one.start()
    before = {name: type(value) for name, value in vars(one).items()}
    for _ in range(10_000):
        one.record_request(10, 1, 5, 0.001)

    assert {name: type(value) for name, value in vars(one).items()}.keys() == before.keys()
    assert not any(isinstance(value, (list, dict, set)) for value in vars(one).values())


def test_unmeasured_values_are_null_in_the_saved_json(tmp_path):
    path = tmp_path / "deep" / "metrics.json"
    with PerformanceMonitorContext("inference", save_path=path) as one:
        one.record_request(10, 1, 5, 0.5)
    with PerformanceMonitorContext("inference", save_path=tmp_path):
        pass
    context = PerformanceMonitorContext("inference", save_path=path / "metrics.json")
    with pytest.warns(UserWarning, match="could not be written"), context:
        pass

    saved = json.loads(path.read_text())
    assert (saved["AL"], saved["IT"], saved["AMU"], saved["num_requests"]) == (0.5, 10.0, None, 1)
    assert (tmp_path / "performance_metrics.json").exists()


def test_monitor_measures_only_the_visible_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert list(PerformanceMonitor(7)._gpus()) == [0, 1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert list(PerformanceMonitor(1)._gpus()) == [1]


# --- with an agent ---------------------------------------------------------------------------------


def run(tmp_path, script, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EFFICIENTLLM_")}
    names = {"RUN_DIR": str(tmp_path / "runs"), "DEVICE": "simulated", "SINKS": "none"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, **{f"EFFICIENTLLM_{name}": value for name, value in names.items()}, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    [folder] = (tmp_path / "runs").glob("*")
    return json.loads(done.stdout), folder


SCRIPT = """
import json, time
from effllm import PerformanceMonitorContext
with PerformanceMonitorContext("inference") as monitor:
    for _ in range(4):
        time.sleep(0.1)
        monitor.record_request(30, 1, 20, computation_time=0.1)
print(json.dumps(monitor.get_metrics()))
"""


def test_monitor_without_training_measures_with_an_agent(tmp_path):
    found, folder = run(tmp_path, SCRIPT)

    assert found["num_requests"] == 4
    assert (found["AL"], found["IT"]) == (pytest.approx(0.1), pytest.approx(200.0))
    assert 20 < found["AMU"] < 60  # the simulated wave
    assert 0 < found["PCU"] <= 1
    assert 100 < found["AEC"] < 700
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("completed", 4)
    assert summary["metrics"]["it_tokens_per_sec"]["value"] == pytest.approx(200.0, rel=0.05)


def test_all_gpus_of_the_process_are_measured(tmp_path):
    two, folder = run(tmp_path, SCRIPT, CUDA_VISIBLE_DEVICES="0,1")

    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["energy"]["by_device"]) == 2
    assert (summary["coverage"]["gpus_expected"], summary["coverage"]["gpus_measured"]) == (2, 2)
    per_gpu = summary["metrics"]["run_energy/watts_per_gpu"]["value"]
    assert two["AEC"] == pytest.approx(2 * per_gpu), "the sum of the power of two GPUs"
    assert 20 < two["AMU"] < 60, "the mean of two GPUs"
