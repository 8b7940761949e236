"""effllm check, and the survey below it."""

import json
import socket

import nvml_library
import pytest
from nvml_library import Gpu, Trace

from effllm.metrics import METRICS
from effllm.survey import NEEDS, needs_of

UUID = "GPU-00000000-1111-2222-3333-444444444444"


def found(cli, *arguments, **variables):
    done = cli.run("check", "--json", *arguments, **variables)
    return done.returncode, json.loads(done.stdout)


def by_metric(survey):
    return {one["metric"]: one for one in survey["metrics"]}


def broken(survey):
    return {one["name"]: one for one in survey["findings"] if one["state"] == "broken"}


@pytest.mark.parametrize(
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
    ],
)
def test_what_a_metric_needs_is_asked_of_its_formula(metric, needs):
    assert needs_of(metric) == needs


def test_every_metric_needs_something_and_every_need_is_some_metrics():
    needed = {name: needs_of(name) for name in METRICS}

    assert all(needed.values())
    assert {need for needs in needed.values() for need in needs} == set(NEEDS)


def test_the_simulated_device_measures_all_but_what_the_settings_lack(cli):
    code, survey = found(cli, "--device", "simulated")

    metrics = by_metric(survey)
    assert (code, survey["measured"], survey["device"]["simulated"]) == (0, True, True)
    assert {name for name in METRICS if not metrics[name]["measured"]} == {"mfu_ratio", "it_tokens_per_sec"}
    assert metrics["aec_watts"]["by"] == ["simulated: energy counter (gpu)", "your loop: iterations"]
    assert metrics["mfu_ratio"]["why_not"] == ["peak: set EFFICIENTLLM_PEAK_TFLOPS to that of one device"]
    assert 0 < survey["cost"]["read_ms"] < 10
    assert 0 < survey["cost"]["stamps_us"] < 1000


def test_with_the_peak_in_the_settings_mfu_can_be_measured(cli):
    _, survey = found(cli, "--device", "simulated", EFFICIENTLLM_PEAK_TFLOPS="989")

    assert by_metric(survey)["mfu_ratio"]["measured"]


def test_the_host_has_no_watts_of_a_gpu(cli):
    code, survey = found(cli, "--device", "host")

    metrics = by_metric(survey)
    assert (code, survey["device"]["kind"]) == (0, "host")
    assert metrics["amu_gb"]["by"] == ["host: memory in use"]
    assert metrics["watts_per_gpu"]["why_not"][-1] == "gpu: device host is none"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = nvml_library.build(tmp_path_factory.mktemp("nvml"))
    if folder is None:
        pytest.skip("no C compiler: the NVML library of the tests cannot be built")
    return folder


def test_a_gpu_is_named_by_its_uuid_and_what_it_lacks_by_nvmls_sentence(cli, library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(Gpu(UUID, "00000000:01:00.0", name="Tracer", unsupported=("energy", "power")))

    code, survey = found(cli, **trace.environment())

    metrics = by_metric(survey)
    [gpu] = [one for one in survey["findings"] if one["name"] == "GPU 0"]
    assert (code, gpu["text"]) == (0, f"Tracer, {UUID}")
    assert metrics["pcu_ratio"]["by"] == ["nvml: busy share of time"]
    assert metrics["aec_watts"]["why_not"] == ["energy: NVML gives neither an energy counter nor the power of this GPU"]


def test_a_device_that_is_not_here_is_broken_and_says_what_to_do(cli, tmp_path):
    code, survey = found(cli, "--device", "nvml", LD_LIBRARY_PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="99")

    assert code == 1
    assert "nvml: " in broken(survey)["device"]["text"]
    assert "EFFICIENTLLM_DEVICE=auto" in broken(survey)["device"]["advice"]
    assert not by_metric(survey)["amu_gb"]["measured"]
    assert by_metric(survey)["al_seconds"]["measured"]


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("settings", {"EFFICIENTLLM_LOG_INTERVAL": "0"}),
        ("settings", {"EFFICIENTLLM_METRICS_ENABLED": "false"}),
        ("run folders", {"EFFICIENTLLM_RUN_DIR": "/dev/null/runs"}),
        ("settings", {"EFFICIENTLLM_SINKS": "consol"}),
    ],
)
def test_what_a_run_cannot_do_without_makes_the_status_1(cli, name, variables):
    code, survey = found(cli, "--device", "simulated", **variables)

    assert (code, survey["measured"]) == (1, False)
    assert name in broken(survey)


def test_an_aggregator_that_nobody_runs_is_broken(cli):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        with_one, _ = found(cli, "--device", "simulated", EFFICIENTLLM_ENDPOINT=endpoint)
    without, survey = found(cli, "--device", "simulated", EFFICIENTLLM_ENDPOINT=endpoint)

    assert (with_one, without) == (0, 1)
    assert "start effllm serve" in broken(survey)["aggregator"]["advice"]


def test_nothing_is_left_behind(cli):
    cli.run("check")

    assert list(cli.folder.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["--all"], ["--device", "simulated"]])
def test_the_table_fits_80_columns_and_has_no_colours_in_a_pipe(cli, arguments):
    done = cli.run("check", *arguments)

    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


def test_the_table_ends_with_what_is_broken(cli):
    done = cli.run("check", EFFICIENTLLM_RUN_DIR="/dev/null/runs", EFFICIENTLLM_LOG_INTERVAL="0")

    end = " ".join(done.stdout.split("would not be measured")[1].split())
    assert done.returncode == 1
    assert "settings: EFFICIENTLLM_LOG_INTERVAL='0' is not usable" in end
    assert "run folders: /dev/null/runs cannot be written" in end


def test_a_device_that_no_file_reads_is_wrong_use(cli):
    done = cli.run("check", "--device", "tpu")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("there is no such device; there are: auto, host, nvml, simulated\n")
