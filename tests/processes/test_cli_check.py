"""The command effllm check, and the module survey."""

import json
import socket

import pytest
from cases import cases
from nvml_library import Curve, Gpu
from redfish_service import Service, chassis, supply, tree

UUID = "GPU-00000000-1111-2222-3333-444444444444"


def found(cli, *arguments, **variables):
    """Return the exit status and the survey."""
    start = cli.run if "LD_LIBRARY_PATH" in variables else cli.call  # NVML can be loaded only once in a process
    done = start("check", "--json", *arguments, **variables)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def found_with(cli, trace):
    """Return a function that surveys a host with these GPUs."""

    def survey(*gpus, options=(), **variables):
        trace.write(*gpus)
        return found(cli, *options, **trace.environment(), **variables)

    return survey


def by_metric(survey):
    return {one["metric"]: one for one in survey["metrics"]}


def unmeasured(survey):
    return {name for name, one in by_metric(survey).items() if not one["measured"]}


def findings(survey, prefix=""):
    return {one["name"]: one for one in survey["findings"] if one["name"].startswith(prefix)}


def broken(survey):
    return {name: one for name, one in findings(survey).items() if one["state"] == "broken"}


PROFILED = {
    "exposed_communication_ratio", "exposed_seconds", "computation_seconds", "communication_seconds",
    "profiling_seconds",
}  # fmt: skip


def test_check_lists_metrics_that_a_simulated_device_cannot_measure(cli):
    code, survey = found(cli, "--device", "simulated")

    metrics = by_metric(survey)
    assert (code, survey["measured"], survey["device"]["simulated"]) == (0, True, True)
    assert unmeasured(survey) == {
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


def test_check_shows_the_uuid_and_reasons_for_missing_metrics(found_with):
    code, survey = found_with(Gpu(UUID, "00000000:01:00.0", name="Tracer", unsupported=("energy", "power")))

    metrics = by_metric(survey)
    assert (code, findings(survey)["GPU 0"]["text"].startswith(f"Tracer, {UUID}, ")) == (0, True)
    assert metrics["pcu_ratio"]["by"] == ["nvml: share of time in which the device was busy"]
    assert metrics["aec_watts"]["why_not"] == ["energy: NVML gives neither an energy counter nor the power of this GPU"]


@pytest.mark.parametrize("visible", ["MIG-11111111-2222-3333-4444-555555555555", "", "7"])
def test_check_names_a_setting_that_hides_all_gpus(found_with, visible):
    gpus = [Gpu(f"GPU-{n}", f"00000000:0{n}:00.0") for n in range(4)]
    code, survey = found_with(*gpus, CUDA_VISIBLE_DEVICES=visible)

    assert (code, survey["device"]["kind"]) == (0, "host")
    (text,) = [one for one in survey["device"]["not_measured"] if one.startswith("GPU: ")]
    assert findings(survey)["device"]["text"].endswith(f"; no {text}")
    assert "CUDA_VISIBLE_DEVICES" in text and ("of 4 GPUs" in text or "NVML lists no such device" in text)


HALF = Curve("flat", 0.5)
H100 = Gpu(
    UUID, "00000000:01:00.0", name="NVIDIA H100 80GB HBM3", gpm=1, sm_activity=HALF, tensor_activity=HALF,
    dram_activity=HALF,
)  # fmt: skip


def test_check_shows_the_peak_and_gpm_activity_of_a_hopper_gpu(found_with):
    _, survey = found_with(H100)

    assert by_metric(survey)["mfu_ratio"]["by"][-1] == (
        "peak: 989.4 TFLOP/s per GPU, dense BF16, NVIDIA H100 80GB HBM3 in the hardware table"
    )
    assert unmeasured(survey) == {"joules_above_baseline", "co2_kg", "electricity_cost", "gpu_cost", *PROFILED}


def test_node_power_and_its_scope_are_shown(found_with):
    with Service(tree(chassis("1"), supply("1", "0", 500.0)), password=None) as service:
        _, survey = found_with(H100, EFFICIENTLLM_NODE_POWER=service.url)

    assert findings(survey)["node power"]["state"] == "ok"
    assert findings(survey)["power scope"]["text"] == "node-psu"
    assert by_metric(survey)["aec_watts"]["by"][0].startswith("redfish: power readings, integrated (node-psu)")
    assert by_metric(survey)["watts_per_gpu"]["measured"]


def test_repeated_reason_is_shown_as_see_above(cli):
    lines = cli.call("check", "--device", "host", "--all").stdout.splitlines()

    reasons = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if " no " in line}
    assert reasons["watts_per_gpu"] == "no gpu: device host is not a GPU"
    assert reasons["p95_watts_per_gpu"] == "no gpu: see above"


def test_missing_device_is_reported_as_broken_with_advice(cli, tmp_path):
    code, survey = found(cli, "--device", "nvml", LD_LIBRARY_PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="99")

    device = broken(survey)["device"]
    assert (code, "nvml: " in device["text"], "EFFICIENTLLM_DEVICE=auto" in device["advice"]) == (1, True, True)
    assert "amu_gb" in unmeasured(survey) and "al_seconds" not in unmeasured(survey)


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


@cases("arguments", [[], ["--all"]])
def test_table_in_a_pipe_fits_80_columns_has_no_colours_and_leaves_no_file(cli, arguments):
    done = cli.run("check", *arguments)

    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    assert list(cli.folder.iterdir()) == []


def test_table_of_check_ends_with_the_list_of_broken_parts(cli):
    done = cli.run("check", EFFICIENTLLM_RUN_DIR="/dev/null/runs", EFFICIENTLLM_LOG_INTERVAL="0")

    end = " ".join(done.stdout.split("would not be measured")[1].split())
    assert done.returncode == 1
    assert "settings: EFFICIENTLLM_LOG_INTERVAL='0' is not usable" in end
    assert "run folders: /dev/null/runs cannot be written" in end


def test_security_and_state_of_the_secret_are_shown(cli, tmp_path):
    file = tmp_path / "secret"

    def security(mode=None, **variables):
        if mode:
            file.write_text("a" * 64)
            file.chmod(mode)
        _, survey = found(cli, "--device", "simulated", EFFICIENTLLM_SECRET_FILE=str(file), **variables)
        one = findings(survey)["security"]
        return one["state"], one["text"]

    assert security()[1].endswith(f"the secret {file} does not exist yet; rank 0 will create it")
    assert security(0o600) == ("ok", f"auto: CURVE; only you can read the secret {file}")
    state, text = security(0o640)
    assert (state, text.endswith(f"chmod 600 {file}")) == ("missing", True)
    assert security(0o640, EFFICIENTLLM_SECURITY="curve")[0] == "broken"
    assert security(EFFICIENTLLM_SECURITY="none") == (
        "missing", "none: every process that can connect to the port can read and forge reports"
    )  # fmt: skip


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
def test_gpu_that_differs_from_its_peers_is_named_with_a_remedy(found_with, changes, text):
    status, survey = found_with(gpu(1), gpu(2, **changes), gpu(3))
    gpus = findings(survey, "GPU ")

    assert status == 0
    assert [gpus[f"GPU {at}"]["state"] for at in range(3)] == ["ok", "differs", "ok"]
    assert gpus["GPU 1"]["text"].endswith(text) or f"{text}; " in gpus["GPU 1"]["text"]
    assert gpus["GPU 1"]["advice"]


def test_facts_of_a_healthy_gpu_are_shown(found_with):
    """A GPU at its power limit, few errors of a link, and a GPU without readings are usual."""
    hidden = ("links", "ecc", "limit", "clocks", "temperature", "throttle", "processes")
    _, survey = found_with(gpu(1, throttle=0x4, nvlink_errors=7), gpu(2, unsupported=hidden), gpu(3))

    gpus = findings(survey, "GPU ")
    assert gpus["GPU 0"]["text"] == (
        "NVIDIA H100 80GB HBM3, GPU-00000001, 1,980 of 1,980 MHz, 50 °C, limit 700 of 700 W, PCIe 5 x16, 18 NVLinks "
        "with 7 errors, 0 ECC errors"
    )
    assert gpus["GPU 1"]["text"] == "NVIDIA H100 80GB HBM3, GPU-00000002"
    assert {one["state"] for one in gpus.values()} == {"ok"}


@pytest.mark.parametrize(("processes", "reason"), [(1, "(1) uses it"), (0, "torch ")])
def test_load_needs_a_gpu_that_torch_can_use_and_no_process_uses(found_with, processes, reason):
    status, survey = found_with(gpu(1, processes=processes), options=["--load"])

    text = findings(survey)["GPU 0"]["text"]
    assert (status, "not loaded: " in text, reason in text) == (1, True, True)
