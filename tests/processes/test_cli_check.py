"""The command effllm check, and the module survey."""

import json
import socket

import nvml_library
import pytest
from cases import cases
from nvml_library import Curve, Gpu, Trace
from redfish_service import Service, chassis, supply, tree

from effllm.devices import device_names
from effllm.metrics import METRICS
from effllm.metrics.measurable import NEEDS, needs_of

UUID = "GPU-00000000-1111-2222-3333-444444444444"


def found(cli, *arguments, **variables):
    start = cli.run if "LD_LIBRARY_PATH" in variables else cli.call  # NVML can be loaded only once in a process
    done = start("check", "--json", *arguments, **variables)
    return done.returncode, json.loads(done.stdout)


def by_metric(survey):
    return {one["metric"]: one for one in survey["metrics"]}


def broken(survey):
    return {one["name"]: one for one in survey["findings"] if one["state"] == "broken"}


@cases(
    ("metric", "needs"),
    [
        ("amu_gb", ["memory"]),
        ("pcu_ratio", ["utilization"]),
        ("al_seconds", ["iterations"]),
        ("tt_tokens_per_param_per_sec", ["iterations", "tokens", "parameters"]),
        ("aec_watts", ["energy", "iterations"]),
        ("joules_per_token", ["energy", "tokens"]),
        ("mfu_ratio", ["iterations", "tokens", "FLOPs", "peak"]),
        ("it_tokens_per_sec", ["generated tokens"]),
        ("hfu_ratio", ["iterations", "tokens", "hardware FLOPs", "peak"]),
        ("watts_per_gpu", ["gpu", "energy", "iterations"]),
        ("power_limit_ratio", ["gpu", "energy", "power limit", "iterations"]),
        ("p95_watts_per_gpu", ["gpu", "power"]),
        ("timing_error_ratio", ["energy"]),
        ("joules_above_baseline", ["energy", "baseline"]),
        ("computation_seconds", ["iterations", "profile"]),
        ("device_step_seconds", ["gpu", "steps on CUDA"]),
        ("co2_kg", ["energy", "carbon intensity"]),
        ("electricity_cost", ["energy", "price"]),
        ("gpu_cost", ["gpu", "rent"]),
        ("throttled_ratio", ["gpu", "throttling"]),
        ("hottest_c", ["gpu", "temperature"]),
        ("sm_clock_mhz", ["gpu", "clocks"]),
        ("tensor_activity_ratio", ["gpu", "activity"]),
    ],
)
def test_inputs_of_a_metric_are_derived_from_its_formula(metric, needs):
    assert needs_of(metric) == needs


def test_every_metric_has_an_input_and_every_input_is_used():
    needed = {name: needs_of(name) for name in METRICS}

    assert all(needed.values())
    assert {need for needs in needed.values() for need in needs} == set(NEEDS)


PROFILED = {
    "exposed_communication_ratio", "exposed_seconds", "computation_seconds", "communication_seconds",
    "profiling_seconds",
}  # fmt: skip


def test_check_lists_metrics_that_a_simulated_device_cannot_measure(cli):
    code, survey = found(cli, "--device", "simulated")

    metrics = by_metric(survey)
    assert (code, survey["measured"], survey["device"]["simulated"]) == (0, True, True)
    assert {name for name in METRICS if not metrics[name]["measured"]} == {
        "mfu_ratio", "hfu_ratio", "joules_above_baseline", "co2_kg", "electricity_cost",
        "gpu_cost", "throttled_ratio", "hottest_c", "sm_activity_ratio", "tensor_activity_ratio",
        "dram_activity_ratio", *PROFILED,
    }  # fmt: skip
    assert metrics["aec_watts"]["by"] == ["simulated: energy counter (gpu)", "your loop: iterations"]
    assert metrics["power_limit_ratio"]["by"][1] == "simulated: power limit of 650 W"
    assert metrics["mfu_ratio"]["why_not"] == [
        "peak: 'simulated GPU' is not in the hardware table; "
        "set EFFICIENTLLM_PEAK_TFLOPS to the peak TFLOP/s of one device"
    ]
    assert 0 < survey["cost"]["read_ms"] < 10
    assert 0 < survey["cost"]["stamps_us"] < 1000


SETTINGS = {
    "mfu_ratio": ("PEAK_TFLOPS", "989"),
    "joules_above_baseline": ("BASELINE_SECONDS", "5"),
    "co2_kg": ("CARBON_INTENSITY", "380"),
    "electricity_cost": ("PRICE_PER_KWH", "0.21"),
    "gpu_cost": ("PRICE_PER_GPU_HOUR", "2.5"),
    "computation_seconds": ("PROFILE_EVERY", "200"),
}


def test_check_shows_the_setting_that_enables_a_metric(cli):
    _, without = found(cli, "--device", "simulated")
    variables = {f"EFFICIENTLLM_{name}": value for name, value in SETTINGS.values()}
    _, survey = found(cli, "--device", "simulated", **variables)

    for metric, (variable, value) in SETTINGS.items():
        assert f"set EFFICIENTLLM_{variable} to " in by_metric(without)[metric]["why_not"][-1]
        assert by_metric(survey)[metric]["measured"]
        assert f"EFFICIENTLLM_{variable}={value}" in by_metric(survey)[metric]["by"]


def test_check_lists_gpu_metrics_as_missing_for_the_host_device(cli):
    code, survey = found(cli, "--device", "host")

    metrics = by_metric(survey)
    assert (code, survey["device"]["kind"]) == (0, "host")
    assert metrics["amu_gb"]["by"] == ["host: memory in use"]
    for name in ("watts_per_gpu", "p95_watts_per_gpu", "gpu_cost", "sm_activity_ratio"):
        assert metrics[name]["why_not"] == ["gpu: device host is not a GPU"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = nvml_library.build(tmp_path_factory.mktemp("nvml"))
    if folder is None:
        pytest.skip("no C compiler: the NVML library of the tests cannot be built")
    return folder


def test_check_shows_the_uuid_and_reasons_for_missing_metrics(cli, library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(Gpu(UUID, "00000000:01:00.0", name="Tracer", unsupported=("energy", "power")))

    code, survey = found(cli, **trace.environment())

    metrics = by_metric(survey)
    [gpu] = [one for one in survey["findings"] if one["name"] == "GPU 0"]
    assert (code, gpu["text"].startswith(f"Tracer, {UUID}, ")) == (0, True)
    assert metrics["pcu_ratio"]["by"] == ["nvml: share of time in which the device was busy"]
    assert metrics["aec_watts"]["why_not"] == ["energy: NVML gives neither an energy counter nor the power of this GPU"]


@pytest.mark.parametrize("visible", ["MIG-11111111-2222-3333-4444-555555555555", "", "7"])
def test_check_names_a_setting_that_hides_all_gpus(cli, library, tmp_path, visible):
    trace = Trace(library, tmp_path / "trace")
    trace.write(*(Gpu(f"GPU-{n}", f"00000000:0{n}:00.0") for n in range(4)))

    code, survey = found(cli, **trace.environment(), CUDA_VISIBLE_DEVICES=visible)

    assert (code, survey["device"]["kind"]) == (0, "host")
    (text,) = [one for one in survey["device"]["not_measured"] if one.startswith("GPU: ")]
    (shown,) = [one["text"] for one in survey["findings"] if one["name"] == "device"]
    assert shown.endswith(f"; no {text}")
    assert "CUDA_VISIBLE_DEVICES" in text and ("of 4 GPUs" in text or "NVML lists no such device" in text)


H100 = Gpu(
    UUID,
    "00000000:01:00.0",
    name="NVIDIA H100 80GB HBM3",
    gpm=1,
    sm_activity=Curve("flat", 0.5),
    tensor_activity=Curve("flat", 0.3),
    dram_activity=Curve("flat", 0.2),
)


def test_check_shows_the_peak_and_gpm_activity_of_a_hopper_gpu(cli, library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(H100)

    _, survey = found(cli, **trace.environment())

    metrics = by_metric(survey)
    assert metrics["mfu_ratio"]["by"][-1] == (
        "peak: 989.4 TFLOP/s per GPU, dense BF16, NVIDIA H100 80GB HBM3 in the hardware table"
    )
    for name in ("throttled_ratio", "hottest_c", "sm_clock_mhz", "sm_activity_ratio", "dram_activity_ratio"):
        assert metrics[name]["measured"]
    assert {name for name in METRICS if not metrics[name]["measured"]} == {
        "joules_above_baseline", "co2_kg", "electricity_cost", "gpu_cost", *PROFILED,
    }  # fmt: skip


def test_gpm_is_listed_as_missing_on_a_gpu_before_hopper(cli, library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(Gpu(UUID, "00000000:01:00.0", name="NVIDIA A10"))

    _, survey = found(cli, **trace.environment())

    [reason] = by_metric(survey)["sm_activity_ratio"]["why_not"]
    assert (
        reason == "activity: not reported by device nvml; NVIDIA GPUs report their activity through GPM, from Hopper on"
    )


def test_node_power_and_its_scope_are_shown(cli, library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(H100)
    with Service(tree(chassis("1"), supply("1", "0", 500.0)), password=None) as service:
        _, survey = found(cli, **trace.environment(), EFFICIENTLLM_NODE_POWER=service.url)
        _, narrow = found(
            cli, **trace.environment(), EFFICIENTLLM_NODE_POWER="none", EFFICIENTLLM_POWER_SCOPE="gpu+cpu"
        )

    findings = {one["name"]: one for one in survey["findings"]}
    assert (findings["node power"]["state"], findings["power scope"]["text"]) == ("ok", "node-psu")
    assert by_metric(survey)["aec_watts"]["by"][0].startswith("redfish: power readings, integrated (node-psu)")
    assert by_metric(survey)["watts_per_gpu"]["measured"]
    [scope] = [one for one in narrow["findings"] if one["name"] == "power scope"]
    assert (scope["state"], scope["text"]) == ("missing", "not every node can measure gpu+cpu; gpu is used")


def test_repeated_reason_is_shown_as_see_above(cli):
    lines = cli.call("check", "--device", "host", "--all").stdout.splitlines()

    reasons = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if " no " in line}
    assert reasons["watts_per_gpu"] == "no gpu: device host is not a GPU"
    assert reasons["p95_watts_per_gpu"] == "no gpu: see above"


def test_missing_device_is_reported_as_broken_with_advice(cli, tmp_path):
    code, survey = found(cli, "--device", "nvml", LD_LIBRARY_PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="99")

    assert code == 1
    assert "nvml: " in broken(survey)["device"]["text"]
    assert "EFFICIENTLLM_DEVICE=auto" in broken(survey)["device"]["advice"]
    assert not by_metric(survey)["amu_gb"]["measured"]
    assert by_metric(survey)["al_seconds"]["measured"]


@cases(
    ("name", "variables"),
    [
        ("settings", {"EFFICIENTLLM_LOG_INTERVAL": "0"}),
        ("settings", {"EFFICIENTLLM_METRICS_ENABLED": "false"}),
        ("run folders", {"EFFICIENTLLM_RUN_DIR": "/dev/null/runs"}),
        ("settings", {"EFFICIENTLLM_SINKS": "consol"}),
    ],
)
def test_check_exits_with_status_1_for_a_wrong_setting(cli, name, variables):
    code, survey = found(cli, "--device", "simulated", **variables)

    assert (code, survey["measured"]) == (1, False)
    assert name in broken(survey)


def test_endpoint_without_an_aggregator_is_reported_as_broken(cli):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables = {"EFFICIENTLLM_ENDPOINT": f"127.0.0.1:{listener.getsockname()[1]}", "EFFICIENTLLM_SECURITY": "none"}
        with_one, _ = found(cli, "--device", "simulated", **variables)
    without, survey = found(cli, "--device", "simulated", **variables)

    assert (with_one, without) == (0, 1)
    assert "start effllm serve" in broken(survey)["aggregator"]["advice"]


def test_check_leaves_no_file(cli):
    cli.run("check")

    assert list(cli.folder.iterdir()) == []


@cases("arguments", [[], ["--all"]])
def test_table_in_a_pipe_fits_80_columns_and_has_no_colours(cli, arguments):
    done = cli.run("check", *arguments)

    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


def test_table_of_check_ends_with_the_list_of_broken_parts(cli):
    done = cli.run("check", EFFICIENTLLM_RUN_DIR="/dev/null/runs", EFFICIENTLLM_LOG_INTERVAL="0")

    end = " ".join(done.stdout.split("would not be measured")[1].split())
    assert done.returncode == 1
    assert "settings: EFFICIENTLLM_LOG_INTERVAL='0' is not usable" in end
    assert "run folders: /dev/null/runs cannot be written" in end


def test_unknown_device_exits_with_a_usage_error(cli):
    done = cli.call("check", "--device", "tpu")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"there is no such device; available devices: auto, {', '.join(device_names())}\n")


def test_security_and_state_of_the_secret_are_shown(cli, tmp_path):
    def security(**variables):
        found = json.loads(cli.call("check", "--device", "simulated", "--json", **variables).stdout)
        return next((one["state"], one["text"]) for one in found["findings"] if one["name"] == "security")

    file = tmp_path / "secret"
    variables = {"EFFICIENTLLM_SECRET_FILE": str(file)}
    assert security(**variables)[1].endswith(f"the secret {file} does not exist yet; rank 0 will create it")

    file.write_text("a" * 64)
    file.chmod(0o600)
    assert security(**variables) == (
        "ok",
        f"auto: CURVE; only you can read the secret {file}",
    )

    file.chmod(0o640)
    state, text = security(**variables)
    assert (state, text.endswith(f"chmod 600 {file}")) == ("missing", True)
    assert security(**variables, EFFICIENTLLM_SECURITY="curve")[0] == "broken"

    state, text = security(EFFICIENTLLM_SECURITY="none")
    assert (state, text) == ("missing", "none: every process that can connect to the port can read and forge reports")


def gpu(number, **changes):
    healthy = {"pcie_width": 16, "pcie_width_max": 16, "pcie_generation": 5, "nvlinks": 18}
    name = "NVIDIA H100 80GB HBM3"
    return Gpu(f"GPU-0000000{number}", f"00000000:0{number}:00.0", name=name, **{**healthy, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"throttle": 0x40}, "its clock is lowered (hw thermal)"),
        ({"ecc_uncorrected": 2}, "uncorrected memory errors"),
        ({"nvlink_errors": 500}, "many more errors of its NVLinks than its peers have"),
        ({"pcie_width": 8}, "8 of 16 PCIe lanes"),
        ({"power_limit_w": 500.0, "power_limit_default_w": 700.0}, "power limit below its default"),
        ({"sm_clock_max_mhz": 1410.0}, "maximum SM clock 1410 MHz, of its peers 1980 MHz"),
        ({"nvlinks": 17}, "active NVLinks 17, of its peers 18"),
    ],
)
def test_gpu_that_differs_from_its_peers_is_named_with_a_remedy(cli, library, tmp_path, changes, text):
    trace = Trace(library, tmp_path / "trace")
    trace.write(gpu(1), gpu(2, **changes), gpu(3))
    status, survey = found(cli, **trace.environment())
    gpus = {one["name"]: one for one in survey["findings"] if one["name"].startswith("GPU ")}

    assert status == 0
    assert [gpus[f"GPU {at}"]["state"] for at in range(3)] == ["ok", "differs", "ok"]
    assert gpus["GPU 1"]["text"].endswith(text) or f"{text}; " in gpus["GPU 1"]["text"]
    assert gpus["GPU 1"]["advice"]


def test_facts_of_a_healthy_gpu_are_shown(cli, library, tmp_path):
    """A GPU at its power limit, and few errors of a link, are usual."""
    trace = Trace(library, tmp_path / "trace")
    trace.write(gpu(1, throttle=0x4, nvlink_errors=7), gpu(2))
    _, survey = found(cli, **trace.environment())

    text = next(one["text"] for one in survey["findings"] if one["name"] == "GPU 0")
    assert text == (
        "NVIDIA H100 80GB HBM3, GPU-00000001, 1,980 of 1,980 MHz, 50 °C, limit 700 of 700 W, PCIe 5 x16, 18 NVLinks "
        "with 7 errors, 0 ECC errors"
    )
    assert {one["state"] for one in survey["findings"] if one["name"].startswith("GPU ")} == {"ok"}


def test_gpu_without_the_readings_has_no_difference(cli, library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    hidden = ("links", "ecc", "limit", "clocks", "temperature", "throttle", "processes")
    trace.write(gpu(1), gpu(2, unsupported=hidden))
    _, survey = found(cli, **trace.environment())

    (one,) = (one for one in survey["findings"] if one["name"] == "GPU 1")
    assert (one["state"], one["text"]) == ("ok", "NVIDIA H100 80GB HBM3, GPU-00000002")


def test_load_is_refused_on_a_gpu_that_a_process_uses(cli, library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(gpu(1, processes=1))
    status, survey = found(cli, "--load", **trace.environment())

    assert status == 1
    (one,) = (one for one in survey["findings"] if one["name"] == "GPU 0")
    assert "not loaded: " in one["text"] and "(1) uses it" in one["text"]


def test_load_without_a_gpu_that_torch_can_use_has_a_reason(cli, library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(gpu(1))
    status, survey = found(cli, "--load", **trace.environment())

    assert status == 1
    assert "not loaded: torch " in next(one["text"] for one in survey["findings"] if one["name"] == "GPU 0")
