"""effllm/metrics/: each formula, compared with values computed by hand, and the table that all sinks use."""

import pytest
from cases import cases
from msgspec import structs
from sink_examples import complete_totals, make_totals, with_keys

from effllm import metrics
from effllm.metrics import METRICS, contract_metrics, measurable, metric_of_tag, window_values
from effllm.records.job import ClusterTotals, Overhead
from effllm.records.rank import Profile
from effllm.store.reader import totals_by_key

GIB = 2**30

# A job of 4 GPUs: 100 iterations in 50 s; the steps of the slowest rank take 40 s.
TOTALS = make_totals(
    parameters=1_000_000,
    iterations=100,
    time_s=50.0,
    slowest_step_s=40.0,
    slowest_iterations=100,
    wait_s=5.0,
    tokens=600_000,
    tokens_processed=800_000,
    samples=300,
    profile=Profile(iterations=4, time_s=2.0, communication_s=0.8, exposed_s=0.5, computing_s=1.2, cost_s=0.1),
    device_steps=99,
    device_step_s=37.62,
    generated_tokens=900,
    generation_s=30.0,
    memory_mean_bytes=2.5 * GIB,
    memory_min_bytes=2.0 * GIB,
    memory_max_bytes=3.0 * GIB,
    memory_peak_bytes=4.0 * GIB,
    utilization_mean=0.9,
    utilization_min=0.8,
    energy_j=60_000.0,
    energy_time_s=40.0,
    energy_tokens=480_000,
    energy_samples=240,
    energy_iterations=80,
    energy_complete=False,
    energy_measured_j=70_000.0,
    energy_gpus_j=48_000.0,
    energy_error_j=120.0,
    energy_gain_error_j=3_000.0,
    energy_estimated_j=600.0,
    gpus=4,
    world_size=8,
    peak_flops_per_s=4e9,
    flops_per_token=2e5,
    hardware_flops_per_token=3e5,
    power_limit_w=1600.0,
    power_peak_w=398.0,
    power_histogram_s={20: 60.0, 30: 35.0, 39: 5.0},
    throttled_s=8.0,
    throttle_covered_s=200.0,
    temperature_max_c=81.0,
    sm_clock_hz=1.755e9,
    sm_activity=0.7,
    tensor_activity=0.4,
    dram_activity=0.3,
    baseline_w=300.0,
    carbon_g_per_kwh=400.0,
    pue=1.2,
    price_per_kwh=0.25,
    price_per_gpu_hour=3.6,
    elapsed_s=200.0,
    class_s={"kept": 80.0, "generation": 20.0, "redone": 10.0, "restart_gap": 30.0, "startup": 12.0, "checkpoint": 8.0,
             "unknown": 40.0},
    class_j={"kept": 50_000.0, "redone": 4_000.0, "straggling": 300.0, "uneven_ranks": 80.0, "hang": 20.0,
             "restart_gap": None},
    rank_seconds=1600.0,
    overhead=Overhead(
        recorder_cpu_s=0.016, agents_cpu_s=8.0, aggregator_cpu_s=3.0, sent_bytes=320_000, received_bytes=320_000
    ),
    stalled_s=45.0,
    straggling_s=2.0,
    straggling_gpu_s=14.0,
    straggling_j=4200.0,
    stragglers=1,
)  # fmt: skip
NOTHING = ClusterTotals()

BY_HAND = {
    "amu_gb": 2.5,
    "pcu_ratio": 0.9,
    "al_seconds": 0.4,  # 40 / 100
    "tt_tokens_per_param_per_sec": 0.012,  # 600,000 / 50 / 1,000,000
    "st_samples_per_param_per_sec": 6e-6,  # 300 / 50 / 1,000,000
    "aec_watts": 1500.0,  # 60,000 / 40
    "it_tokens_per_sec": 30.0,  # 900 / 30
    "watts_per_gpu": 300.0,  # 48,000 / 40 / 4
    "p95_watts_per_gpu": 305.0,  # 95 of 100 s are below 310 W
    "median_watts_per_gpu": 205.0,
    "peak_watts_per_gpu": 398.0,
    "power_limit_ratio": 0.75,  # 48,000 / 40 / 1600
    "timing_error_ratio": 0.002,  # 120 / 60,000
    "sensor_error_ratio": 0.05,
    "total_joules": None,  # a part of the run was not measured
    "stalled_s": 45.0,
    "named_ranks": 1.0,
    "waiting_ratio": 0.04,  # 2 / 50
    "waiting_gpu_seconds": 14.0,
    "waiting_joules": 4200.0,
    "measured_joules": 70_000.0,
    "joules_per_token": 0.125,  # 60,000 / 480,000
    "joules_per_iteration": 750.0,  # 60,000 / 80
    "joules_per_sample": 250.0,  # 60,000 / 240
    "joules_per_generated_token": None,  # a part of the run was not measured
    "total_wh": None,  # a part of the run was not measured
    "joules_per_10k_tokens": 1250.0,
    "tokens_per_joule": 8.0,  # 480,000 / 60,000
    "joules_above_baseline": 48_000.0,  # 60,000 - 300 * 40
    "co2_kg": None,
    "electricity_cost": None,
    "gpu_cost": 0.2,  # 4 GPUs * 50 s / 3600 * 3.6
    "tokens_per_second": 12_000.0,
    "tokens_per_second_per_gpu": 3000.0,
    "samples_per_second": 6.0,
    "seconds_per_iteration": 0.5,
    "data_wait_ratio": 0.1,
    "exposed_communication_ratio": 0.25,  # 0.5 / 2
    "exposed_seconds": 0.1,  # 0.25 * 0.4
    "computation_seconds": 0.3,  # 0.4 - 0.1
    "communication_seconds": 0.16,  # 0.8 / 2 * 0.4
    "device_step_seconds": 0.38,  # 37.62 / 99
    "profiling_seconds": 0.025,  # 0.1 / 4
    "padding_ratio": 0.25,  # 1 - 600 / 800
    "tflops_per_gpu": 0.0006,  # 12,000 * 2e5 / 4 / 1e12
    "mfu_ratio": 0.6,  # 12,000 * 2e5 / 4e9
    "hfu_ratio": 0.9,
    "peak_gb": 4 * GIB / 1e9,
    "smallest_mean_gb": 2 * GIB / 1e9,
    "largest_mean_gb": 3 * GIB / 1e9,
    "least_utilization_ratio": 0.8,
    "throttled_ratio": 0.04,  # 8 / 200
    "hottest_c": 81.0,
    "sm_clock_mhz": 1755.0,
    "sm_activity_ratio": 0.7,
    "tensor_activity_ratio": 0.4,
    "dram_activity_ratio": 0.3,
    "ratio": 0.5,  # (80 + 20) / 200
    "redone_ratio": 0.05,
    "restart_gap_ratio": 0.15,
    "startup_ratio": 0.06,
    "checkpoint_ratio": 0.04,
    "unknown_ratio": 0.2,
    "lost_joules": 4_400.0,  # 4000 + 300 + 80 + 20
    "agent_cpu_ratio": 0.005,  # 8 / 1600
    "recorder_cpu_ratio": 1e-5,
    "aggregator_cpu_ratio": 0.015,  # 3 / 200
    "sent_bytes_per_second": 200.0,
}
COMPLETE = with_keys(TOTALS, energy_complete=True)
UNCOUNTED = ("tokens_per_second", "tokens_per_second_per_gpu", "samples_per_second", "joules_per_token")


@cases(("name", "expected"), BY_HAND.items())
def test_formula_gives_the_value_computed_by_hand(name, expected):
    value = METRICS[name].formula(TOTALS)

    assert value is None if expected is None else value == pytest.approx(expected, rel=1e-12)


@cases("name", METRICS)
def test_unmeasured_metric_has_no_value(name):
    assert METRICS[name].formula(NOTHING) is None


def test_evaluate_leaves_out_unmeasured_metrics():
    assert window_values(NOTHING, NOTHING, NOTHING) == {}
    some = with_keys(TOTALS, energy_j=None, tokens=0)

    values = window_values(some, NOTHING, NOTHING)

    assert "aec_watts" not in values
    assert "tt_tokens_per_param_per_sec" not in values
    assert values["al_seconds"] == 0.4


GPU_READINGS = {
    "power": ("power_peak_w", "power_histogram_s"),
    "power limit": ("power_limit_w",),
    "throttling": ("throttled_s", "throttle_covered_s"),
    "temperature": ("temperature_max_c",),
    "clocks": ("sm_clock_hz",),
    "activity": ("sm_activity", "tensor_activity", "dram_activity"),
}
ENERGY = tuple(key for key in totals_by_key(complete_totals()) if key.startswith("energy_"))
#: Input of metrics -> keys without a value if the input is missing.
MISSING_WITHOUT = {
    "gpu": ("gpus", "energy_gpus_j", "device_steps", *(key for keys in GPU_READINGS.values() for key in keys)),
    "memory": tuple(f"memory_{kind}_bytes" for kind in ("mean", "min", "max", "peak")),
    "utilization": ("utilization_mean", "utilization_min", "utilization_max"),
    "energy": (*ENERGY, "straggling_j", "class_j"),
    **GPU_READINGS,
    "iterations": ("iterations", "time_s", "slowest_iterations", "energy_time_s"),
    "tokens": ("tokens", "energy_tokens"),
    "samples": ("samples", "energy_samples"),
    "parameters": ("parameters",),
    "FLOPs": ("flops_per_token",),
    "hardware FLOPs": ("hardware_flops_per_token",),
    "peak": ("peak_flops_per_s",),
    "generated tokens": ("generated_tokens", "generation_s"),
    "profile": ("profile",),
    "steps on CUDA": ("device_steps",),
    "baseline": ("baseline_w",),
    "carbon intensity": ("carbon_g_per_kwh",),
    "price": ("price_per_kwh",),
    "rent": ("price_per_gpu_hour",),
    "stalls": ("stalled_s",),
    "own time": ("straggling_s",),
    "elapsed time": ("elapsed_s", "rank_seconds"),
    "own cost": ("overhead",),
}


def test_a_metric_needs_the_inputs_without_which_it_has_no_value():
    totals = complete_totals()
    keys = {**totals_by_key(totals), **structs.asdict(totals.constants)}

    for name, entry in METRICS.items():
        lost = [
            need
            for need, missing in MISSING_WITHOUT.items()
            if entry.formula(make_totals(**{key: value for key, value in keys.items() if key not in missing})) is None
        ]
        assert list(entry.needs) == lost, name


def test_check_has_a_source_for_every_input():
    assert {need for entry in METRICS.values() for need in entry.needs} == {
        *measurable.READ, *measurable.FROM_LOOP, *measurable.OWN, *measurable.FROM_SETTINGS, "peak",
    }  # fmt: skip


def test_no_tag_has_two_bases():
    bases = {
        base: with_keys(COMPLETE, time_s=COMPLETE.loop.time_s * factor, energy_j=COMPLETE.energy.joules * factor)
        for base, factor in (("run", 2), ("window", 3), ("job", 5))
    }

    of_window, of_run = window_values(**bases), metrics.summary_values(bases["run"], bases["job"])
    assert {tag for tag in of_window.keys() & of_run.keys() if of_window[tag] != of_run[tag]} == set()
    for name in ("throughput/tokens_per_second", "throughput/mfu_ratio", "energy/joules_per_token"):
        assert of_window[name] == metric_of_tag(name).formula(bases["window"])
        assert of_run[f"run_{name}"] == metric_of_tag(name).formula(bases["run"])
        assert name not in of_run


def test_headline_metrics_have_three_bases_and_others_have_one_base():
    job = with_keys(TOTALS, utilization_mean=0.3, energy_complete=True)
    window = with_keys(TOTALS, utilization_mean=0.6, gpus=2)

    values = window_values(TOTALS, window, job)

    assert [values[tag] for tag in ("pcu_ratio", "window/pcu_ratio", "job/pcu_ratio")] == [0.9, 0.6, 0.3]
    assert values["energy/watts_per_gpu"] == 600.0, "of the window"
    assert values["energy/total_joules"] == 60_000.0, "of the job"
    assert values["energy/joules_per_token"] == values["run_energy/joules_per_token"]


def test_full_report_has_every_metric():
    tags = window_values(COMPLETE, COMPLETE, COMPLETE)

    assert len(tags) == sum(len(entry.bases) for entry in METRICS.values() if entry.in_windows)
    assert {metric_of_tag(tag).name for tag in tags} == {entry.name for entry in METRICS.values() if entry.in_windows}
    assert {metric_of_tag(tag).name for tag in metrics.summary_values(COMPLETE, COMPLETE)} == set(METRICS)


def test_headline_lines_are_in_the_order_of_the_contract():
    labels = [entry.console.partition(":")[0] for entry in contract_metrics()]

    assert labels[:6] == [
        "AMU (GB)",
        "PCU (Ratio)",
        "AL (Seconds)",
        "TT (Tokens/Param/Sec)",
        "ST (Samples/Param/Sec)",
        "AEC (Watts)",
    ]
    assert [entry.console.partition(": ")[2] for entry in contract_metrics()][:6] == [
        "{:.2f}", "{:.3f}", "{:.4f}", "{:.2e}", "{:.2e}", "{:.2f}",
    ]  # fmt: skip
    assert [entry.tag("run") for entry in contract_metrics()] == list(BY_HAND)[:7]


def test_tag_is_mapped_to_its_metric():
    for tag in window_values(TOTALS, TOTALS, TOTALS):
        assert metric_of_tag(tag).name == tag.rpartition("/")[2]
    assert metric_of_tag("health/late_reports") is None


def test_new_metric_needs_only_one_decorated_function(metric_table):
    metric_table.clear()

    @metrics.metric("iterations", needs=("iterations",), console="Iterations: {:.0f}")
    def number_of_iterations(totals: ClusterTotals) -> float | None:
        """Iterations so far."""
        return float(totals.counts.iterations)

    @metrics.metric("ratio", needs=("memory",), group="memory", bases=("window", "run"))
    def spread(totals: ClusterTotals) -> float | None:
        """Smallest mean over the largest mean."""
        return None

    tags = ("number_of_iterations", "window/number_of_iterations", "job/number_of_iterations")
    assert window_values(TOTALS, TOTALS, TOTALS) == dict.fromkeys(tags, 100.0)
    assert metric_of_tag("job/number_of_iterations").help == "Iterations so far."
    assert [entry.name for entry in contract_metrics()] == ["number_of_iterations"]
    entry = metrics.METRICS["spread"]
    assert (entry.tag("window"), entry.tag("run")) == ("memory/spread", "run_memory/spread")
    assert entry.summary_bases == ("run",)


def test_duplicate_name_or_missing_help_is_an_error(metric_table):
    def nameless(totals: ClusterTotals) -> float | None:
        return None

    with pytest.raises(ValueError, match="nameless has no docstring"):
        metrics.metric("s", needs=())(nameless)
    nameless.__doc__ = "Say nothing."
    metrics.metric("s", needs=())(nameless)
    with pytest.raises(ValueError, match="two metrics are named nameless"):
        metrics.metric("s", needs=())(nameless)


def test_every_metric_has_a_unit_and_a_help_text():
    for entry in METRICS.values():
        assert entry.unit
        assert entry.help.endswith((".", ")")), entry.name


def test_mfu_of_a_job_at_peak_is_exactly_one():
    # 8 devices of 1e12 FLOP/s at 4e9 FLOPs per token can process 2000 tokens/s.
    at_peak = with_keys(TOTALS, tokens=200_000, time_s=100.0, peak_flops_per_s=8e12, flops_per_token=4e9, gpus=8)

    assert metrics.throughput.mfu_ratio(at_peak) == 1.0
    assert metrics.throughput.tflops_per_gpu(at_peak) == 1.0


def test_mfu_and_hfu_above_one_have_no_value():
    above = with_keys(TOTALS, flops_per_token=4e5, hardware_flops_per_token=5e5)

    assert (metrics.throughput.mfu_ratio(above), metrics.throughput.hfu_ratio(above)) == (None, None)
    assert metrics.throughput.share_of_peak(above, 4e5) == pytest.approx(1.2), "which an event reports"


@cases(
    ("name", "changes", "expected"),
    [
        ("mfu_ratio", {"peak_flops_per_s": None}, None),
        ("mfu_ratio", {"flops_per_token": None}, None),
        # without counts: no value, and not zero
        *((name, {"tokens": 0, "samples": 0, "energy_tokens": 0}, None) for name in UNCOUNTED),
        ("tt_tokens_per_param_per_sec", {"parameters": None}, None),
        ("st_samples_per_param_per_sec", {"parameters": 0}, None),
        ("padding_ratio", {"tokens_processed": 0}, None),
        ("padding_ratio", {"tokens_processed": 600_000}, None),
        # 12,000 tokens/s on 8 ranks
        ("tokens_per_second_per_gpu", {"gpus": 0}, 1500.0),
        ("watts_per_gpu", {"gpus": 0}, None),
        ("gpu_cost", {"gpus": 0}, None),
        ("gpu_cost", {"price_per_gpu_hour": None}, None),
        ("total_wh", {"energy_complete": True}, 60_000 / 3600),
        ("joules_per_generated_token", {"energy_complete": True}, 60_000 / 900),
        # 60 kJ are 1/60 kWh: 1/60 * 1.2 * 400 g = 8 g
        ("co2_kg", {"energy_complete": True}, 0.008),
        ("co2_kg", {"energy_complete": True, "pue": 1.0}, 0.4 / 60),
        ("co2_kg", {"energy_complete": True, "carbon_g_per_kwh": None}, None),  # never guessed
        ("co2_kg", {"energy_complete": True, "carbon_g_per_kwh": 0.0}, 0.0),  # zero is an intensity
        # 1/60 kWh * 1.2 * 0.25
        ("electricity_cost", {"energy_complete": True}, 0.005),
        ("electricity_cost", {"energy_complete": True, "price_per_kwh": None}, None),
        ("joules_above_baseline", {"baseline_w": 2000.0}, -20_000.0),
        # The mean is 48,000 J / 40 s / 4 GPUs: the peak is not below.
        ("peak_watts_per_gpu", {"power_peak_w": 250.0}, 300.0),
        ("peak_watts_per_gpu", {"power_peak_w": None}, None),
        # A percentile is not above the peak.
        ("p95_watts_per_gpu", {"power_histogram_s": {50: 10.0}, "power_peak_w": 501.0}, 501.0),
        ("median_watts_per_gpu", {"power_histogram_s": {50: 10.0}, "power_peak_w": 501.0}, 501.0),
        ("median_watts_per_gpu", {"power_histogram_s": {50: 10.0}, "power_peak_w": 509.0}, 505.0),
    ],
)
def test_formula_follows_what_is_known(name, changes, expected):
    value = METRICS[name].formula(with_keys(TOTALS, **changes))

    assert value is None if expected is None else value == pytest.approx(expected)


def test_compression_ratio_is_size_ratio_times_kept_score():
    # A quarter of the size at 95 % of the score: 4 * 0.95.
    assert metrics.table.model_compression_ratio(16e9, 4e9, 80.0, 76.0) == pytest.approx(3.8)
    for wrong in ((0, 4e9, 80, 76), (16e9, 0, 80, 76), (16e9, 4e9, 0, 76), (float("nan"), 4e9, 80, 76)):
        with pytest.raises(ValueError, match="above 0"):
            metrics.table.model_compression_ratio(*wrong)


def test_inference_throughput_is_not_divided_by_parameters():
    assert metrics.table.inference_throughput(900, 30.0) == 30.0
    assert metrics.table.inference_throughput(900, 0.0) is None
    assert metrics.table.inference_throughput(0, 30.0) is None
