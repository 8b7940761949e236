"""Energy instruments: formulas, the document's example, bad arguments, and sums of spans."""

import dataclasses
import math
import time
from types import SimpleNamespace

import pytest
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from effllm.instruments import EnergyMetrics, RobustGPUMonitor
from effllm.instruments._energy import Baseline, SpanReadings, above_baseline_j
from effllm.instruments.energy import MonitoredDevices
from effllm.instruments.energy_report import (
    checked_intensity,
    final_values,
    history_entry,
    report,
    write_files,
)
from effllm.records.energy import EnergyAmount
from effllm.records.spans import SpanPart

NAN = float("nan")


def part(joules, seconds, start_s=0.0, device=0, **more):
    ends = {"start_ns": round(start_s * 1e9), "end_ns": round((start_s + seconds) * 1e9)}
    return SpanPart(1, device, 1, **ends, joules=joules, covered_s=seconds, **more)


def block(joules, seconds, steps, **more):
    return SpanReadings({0: part(joules, seconds, **more)}, 1, 1 + round(seconds * 1e9), steps)


#: The training takes one hour at 550 W, with 1,000 steps in 3 epochs.
HOUR = block(550.0 * 3600, 3600.0, 1000, utilization_seconds=0.9 * 3600, utilization_covered_s=3600.0)


def test_final_values_of_the_example():
    final = final_values(HOUR, 3.0, checked_intensity(None, "document"))

    assert final == {
        "final_energy/total_energy_consumed_kwh": pytest.approx(0.55),
        "final_energy/energy_per_step_wh": pytest.approx(0.55),  # the example's 1.98 "Wh" are kJ
        "final_energy/energy_per_epoch_kwh": pytest.approx(0.55 / 3),
        "final_energy/energy_efficiency_score": pytest.approx(0.55 / 0.9),
        "final_energy/carbon_footprint_estimate_kg": pytest.approx(0.275),  # 1000 times the documented mass
    }


def test_carbon_estimate_needs_a_carbon_intensity():
    name = "final_energy/carbon_footprint_estimate_kg"
    assert math.isnan(final_values(HOUR, 3.0, checked_intensity(None, None))[name])
    assert final_values(HOUR, 3.0, checked_intensity(0.3, None))[name] == pytest.approx(0.55 * 0.3)
    assert "carbon" not in report(HOUR, 3.0, None)


def test_report_has_the_values_in_two_languages():
    assert report(HOUR, 3.0, 0.5).splitlines()[:5] == [
        "FINAL ENERGY REPORT:",
        "• Duration: 3600s (1.00h)",
        "• Steps: 1000",
        "• Epochs: 3.00",
        "• Total energy: 0.5500 kWh",
    ]
    assert report(HOUR, 3.0, 0.5).endswith("• Estimated carbon footprint: 0.275000kg CO2")
    assert report(HOUR, 3.0, 0.5, "pt").splitlines() == [
        "RELATÓRIO ENERGÉTICO FINAL:",
        "• Duração: 3600s (1.00h)",
        "• Steps: 1000",
        "• Épocas: 3.00",
        "• Energia total: 0.5500 kWh",
        "• Potência média: 550.0W",
        "• Energia por step: 0.5500Wh",
        "• Energia por época: 0.1833kWh",
        "• Score de eficiência: 0.6111",
        "• Pegada de carbono estimada: 0.275000kg CO2",
    ]


def test_report_of_unmeasured_energy_has_no_number():
    empty = SpanReadings({}, 0, 10**9, 5)

    assert "• Total energy: not measured\n" in report(empty, 1.0, 0.5)
    assert all(math.isnan(value) for value in final_values(empty, 1.0, 0.5).values())


@cases("wrong", [(-1.0, None), (NAN, None), (math.inf, None), ("much", None), (None, "world"), (0.5, "document")])
def test_invalid_carbon_intensity_raises_an_error(wrong):
    with pytest.raises(ValueError, match="carbon_intensity"):
        checked_intensity(*wrong)


@cases(
    ("utilization", "divisor"), [((5.0, 10.0), 0.5), ((0.01, 10.0), 0.01), ((0.0, 10.0), 0.01), ((0.0, 0.0), math.nan)]
)
def test_efficiency_score_is_energy_per_step_over_utilization(utilization, divisor):
    """0.6 Wh in a step; a utilization below 0.01 counts as 0.01."""
    seconds, covered_s = utilization
    one = block(0.6 * 3600, 10.0, 1, utilization_seconds=seconds, utilization_covered_s=covered_s)

    assert one.efficiency == pytest.approx(0.6 / divisor, nan_ok=True)
    metrics = EnergyMetrics(0.0, 1, 0.0, 360.0, 360.0, 360.0, 0.6, 60.0, 60.0, 80.0, 0.0, "", 2.0, 4)
    assert history_entry(metrics, one, Baseline())["energy_efficiency"] == pytest.approx(0.6 / divisor, nan_ok=True)


def test_energy_above_the_baseline_is_never_negative():
    readings = SpanReadings.of([part(1000.0, 10.0, inside_j2=25.0)])

    assert above_baseline_j(readings, Baseline(60.0, 0.5, 5.0)) == (
        pytest.approx(400.0), pytest.approx(math.hypot(1.96 * 5.0, 5.0))
    )  # fmt: skip
    assert above_baseline_j(readings, Baseline(200.0, 0.5, 5.0))[0] == 0.0
    assert math.isnan(above_baseline_j(readings, Baseline())[0])


def test_baseline_of_too_few_samples_is_not_measured():
    assert math.isnan(Baseline.of(SpanReadings.of([part(5.0, 0.1)]), 0.2).power_w)
    assert Baseline.of(SpanReadings.of([part(100.0, 2.0)]), 0.2).power_w == pytest.approx(50.0)


AMOUNTS = st.lists(st.floats(0.0, 1e6), min_size=5, max_size=5)


@given(AMOUNTS, AMOUNTS, st.booleans())
def test_sum_of_spans_equals_the_sum_of_the_aggregator(one, other, is_shared):
    names = ("joules", "start_j2", "end_j2", "inside_j2", "gain_j")
    first, second = (EnergyAmount(**dict(zip(names, values, strict=True)), covered_s=1.0) for values in (one, other))
    start_s = 1.0 if is_shared else 1.5
    spans = [
        part(a.joules, 1.0, s, start_j2=a.start_j2, end_j2=a.end_j2, inside_j2=a.inside_j2, gain_j=a.gain_j)
        for a, s in ((first, 0.0), (second, start_s))
    ]
    found = spans[0].then(spans[1])
    known = first.then(second) if is_shared else first + second

    assert {name: getattr(found, name) for name in (*names, "covered_s")} == pytest.approx(
        {name: getattr(known, name) for name in (*names, "covered_s")}
    )
    assert found.error_j == pytest.approx(known.error_j)


@cases(("other", "joules", "power_w"), [((300.0, 10.0), 400.0, 40.0), ((NAN, 0.0), NAN, NAN)])
def test_energy_of_several_devices_is_added(other, joules, power_w):
    readings = SpanReadings.of([part(100.0, 10.0, device=0), part(*other, device=1)])

    assert (readings.joules, readings.power_w) == pytest.approx((joules, power_w), nan_ok=True)
    assert readings.covered_s == pytest.approx(min(10.0, other[1]))


def test_metrics_have_the_documented_fields():
    others = {"step": "int", "samples_count": "int", "gpu_name": "str"}
    fields = dataclasses.fields(EnergyMetrics)

    assert [field.name for field in fields] == [
        "timestamp", "step", "epoch", "power_avg_w", "power_max_w", "power_min_w", "energy_consumed_wh",
        "temperature_avg_c", "temperature_max_c", "utilization_avg_percent", "memory_used_avg_mb", "gpu_name",
        "duration_s", "samples_count",
    ]  # fmt: skip
    assert [field.type for field in fields] == [others.get(field.name, "float") for field in fields]


@cases(
    "wrong",
    [{"sampling_interval": 0}, {"sampling_interval": "fast"}, {"baseline_wait_s": -1.0}, {"device": -1},
     {"sampling_interval": NAN}, {"device": True}, {"device": "tpu:0"}],
)  # fmt: skip
def test_invalid_argument_of_the_monitor_raises_an_error(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RobustGPUMonitor(**wrong)


def test_monitor_that_was_not_started_has_no_values():
    found = RobustGPUMonitor().get_metrics_since_timestamp(0.0)

    assert math.isnan(found.energy_consumed_wh)
    assert math.isnan(found.power_avg_w)
    assert found.samples_count == 0


@cases(
    ("gaps", "cause"),
    [
        (["energy: no RAPL power sensor", "GPU: the driver is not loaded"], "GPU: the driver is not loaded"),
        (["utilization: not read", "energy: no RAPL power sensor"], "no RAPL power sensor"),
    ],
)
def test_warning_about_missing_energy_names_its_cause(gaps, cause):
    monitor = RobustGPUMonitor()
    monitor._chain = SimpleNamespace(devices=[{**HOST, "not_measured": gaps}], unavailable=[])
    monitor._spans.append(SpanReadings())

    with pytest.warns(UserWarning, match=f"energy is not measured: {cause}"):
        monitor.warn_if_unmeasured()


HOST = {"name": "host", "is_gpu": False, "torch_index": None, "only_power": False, "not_measured": []}
GPU_1 = {"name": "H100", "is_gpu": True, "torch_index": 1, "only_power": False, "not_measured": []}
GPU_2 = {**GPU_1, "torch_index": 2}
NODE = {**HOST, "name": "node", "only_power": True}


@cases(
    ("device", "facts", "positions"),
    [
        (None, [GPU_1, GPU_2, NODE], [0, 1]),
        (None, [HOST], [0]),
        (2, [GPU_1, GPU_2, NODE], [1]),
        ("cuda:1", [GPU_1, GPU_2], [0]),
        ("cuda", [GPU_1, NODE], [0]),
        (0, [GPU_1], []),  # the rank computes on another GPU
        ("cpu", [GPU_1], []),
        ("cpu", [HOST], [0]),
        (0, [HOST], [0]),  # without a GPU, as the other instruments
        (0, [{**HOST, "not_measured": ["GPU: the driver is not loaded"]}], []),  # the host does not stand for a GPU
    ],
)
def test_device_is_chosen_by_its_index_or_name(device, facts, positions):
    assert MonitoredDevices(device).positions(facts) == positions


@cases(
    ("device", "facts", "reason"),
    [
        (0, [GPU_1], "device=0 was requested; the agent reads H100 (cuda:1)"),
        ("cpu", [GPU_1], "device='cpu' was requested; the agent reads H100 (cuda:1)"),
        (0, [{**HOST, "not_measured": ["GPU: not loaded"]}], "GPU: not loaded"),
        (None, [{**HOST, "not_measured": ["power: none", "energy: none"]}], "none"),
        (None, [], "no library; no permission"),
    ],
)
def test_reason_of_missing_energy_names_the_cause(device, facts, reason):
    assert MonitoredDevices(device).why_unmeasured(facts, ["no library", "no permission"]) == reason


def test_names_of_the_four_files_have_the_same_time(tmp_path):
    paths = write_files(str(tmp_path / "results"), ([], [], {"energy": NAN}, {}))

    stamp = paths[0].stem.removeprefix("energy_step_history_")
    time.strptime(stamp, "%Y%m%d_%H%M%S")
    names = ["energy_step_history", "energy_interval_history", "energy_monitoring_summary", "robust_gpu_energy"]
    assert [path.name for path in paths] == [f"{name}_{stamp}.json" for name in names]
    assert '"energy": null' in paths[2].read_text()
