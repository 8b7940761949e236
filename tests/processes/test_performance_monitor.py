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


def test_every_value_of_the_monitor_is_nan_before_a_request():
    found = monitor().get_metrics()

    assert set(found) == KEYS | {"IT"}
    assert found.pop("num_requests") == 0
    assert all(math.isnan(value) for value in found.values())


def test_latency_is_the_mean_of_computation_and_communication_time():
    one = monitor()
    one.record_request(100, 1, 40, computation_time=0.3, communication_time=0.1)
    one.record_request(50, 1, 20, computation_time=0.8)

    found = one.get_metrics()
    assert found["AL"] == pytest.approx(0.6)  # (0.4 + 0.8) / 2
    assert found["IT"] == pytest.approx(50.0)  # 60 / 1.2
    assert found["num_requests"] == 2


@pytest.mark.parametrize(
    ("scenario", "key", "value"),
    [("pretraining", "TT", 150 / 1000 / 1.5), ("fine-tuning", "ST", 6 / 1000 / 1.5), ("Inference", "IT", 60 / 1.5)],
)
def test_throughput_is_computed_separately_for_each_scenario(scenario, key, value):
    one = monitor(scenario, 1000)
    one.record_request(100, 4, 40, 1.0)
    one.record_request(50, 2, 20, 0.25, 0.25)

    found = one.get_metrics()
    assert set(found) == KEYS | {key}
    assert found[key] == pytest.approx(value)


def test_throughput_per_parameter_is_nan_without_a_parameter_count():
    one = monitor("pretraining")
    one.record_request(100, computation_time=1.0)

    assert math.isnan(one.get_metrics()["TT"])


def test_unknown_scenario_is_rejected():
    with pytest.raises(ValueError, match="'cooking' is unknown; available scenarios: pretraining"):
        monitor("cooking")


def test_latency_is_nan_for_a_request_without_a_time():
    one = monitor()
    one.record_request(10, 1, 5)

    found = one.get_metrics()
    assert math.isnan(found["AL"])
    assert found["IT"] > 0


def test_latency_as_second_positional_argument_gives_a_warning():
    one = monitor()
    with pytest.warns(UserWarning, match="a count or a time that is not a number"):
        one.record_request(120, 0.73)

    found = one.get_metrics()
    assert (found["num_requests"], one._samples) == (1, 0)
    assert math.isnan(found["AL"])


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

    saved = json.loads(path.read_text())
    assert (saved["AL"], saved["IT"], saved["AMU"], saved["num_requests"]) == (0.5, 10.0, None, 1)
    assert (tmp_path / "performance_metrics.json").exists()


def test_path_that_cannot_be_written_raises_no_exception(tmp_path):
    (tmp_path / "file").write_text("")
    context = PerformanceMonitorContext("inference", save_path=tmp_path / "file" / "metrics.json")
    with pytest.warns(UserWarning, match="could not be written"), context:
        pass


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
