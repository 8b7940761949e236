"""The sink otlp: names and units of OpenTelemetry, energies equal to the summary, and receivers that fail."""

import json
import re
import time
from contextlib import closing
from pathlib import Path

import jobs
import msgspec
import pytest
from sink_examples import complete_totals, make_report, make_run, totals

from effllm import metrics
from effllm.records.device_state import DeviceFeed, DeviceState
from effllm.records.identity import Identity
from effllm.sinks import WriteFailed

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otlp is not installed")

from otlp_receiver import Receiver

from effllm.sinks import otlp

REGISTRY = json.loads((Path(__file__).parents[1] / "otel_hardware.json").read_text())
GPU_0 = DeviceState("GPU-0", "gpu", "a", "H100", "570.1", 1000.0, 600.0, 0.9, 40.0 * 2**30, 80 * 2**30, 61.0)
GPU_1 = DeviceState("GPU-1", "gpu", "b", "H100", "570.1", 500.0, 300.0, 0.5, 20.0 * 2**30, 80 * 2**30, 55.0)
CPU = DeviceState("cpu:a", "cpu", "a", joules=50.0)
NODE = DeviceState("psu:a", "node", "a", joules=2000.0, power_w=900.0)
MODULE = DeviceState("module:a:0", "module", "a", joules=700.0)
DEVICES = (GPU_0, GPU_1, CPU, NODE, MODULE)


def opened(receiver, devices=DEVICES, every=0.0):
    feed = DeviceFeed()
    feed.newest = devices
    options = {"endpoint": f"{receiver.url}/v1/metrics", "every": every}
    return otlp.open_sink(make_run(options=options, devices=feed, identity=lambda: Identity(run_id="mine")))


@pytest.fixture
def receiver():
    with closing(Receiver()) as one:
        yield one


def values(receiver, name):
    return [point.value for point in receiver.points if point.name == name]


def complete_report(iteration=100):
    run = complete_totals(iteration)
    return make_report(iteration, run=run, last=run, job=run)


def test_hardware_metrics_are_those_of_the_registry(receiver):
    opened(receiver).write(complete_report())

    hardware = [point for point in receiver.points if point.name.startswith("hw.")]
    assert {point.name for point in hardware} == set(otlp.DEVICE_INSTRUMENTS)
    for point in hardware:
        known = REGISTRY["metrics"][point.name]
        assert (point.instrument, point.unit) == (known["instrument"], known["unit"]), point.name
        required = {name for name, level in known["attributes"].items() if level == "required"}
        assert required <= set(point.attributes) <= {*known["attributes"]}, point.name
        assert point.attributes.get("hw.type", "gpu") in REGISTRY["hw.type"]


def test_number_of_values_in_doubt_is_sent_if_there_are_any(receiver):
    sink = opened(receiver)
    sink.write(make_report(100))
    assert values(receiver, "effllm.doubtful_values") == []
    sink.write(make_report(110, doubtful=("al_seconds",)))

    assert values(receiver, "effllm.doubtful_values") == [1]


def test_energy_of_a_whole_host_is_not_in_hw_energy(receiver):
    opened(receiver).write(make_report())

    expected = {
        "hw.energy": [50.0, 500.0, 700.0, 1000.0], "hw.power": [300.0, 600.0],
        "hw.host.energy": [2000.0], "hw.host.power": [900.0],
    }  # fmt: skip
    assert {name: sorted(receiver.newest(name).values()) for name in expected} == expected


def test_devices_have_the_resource_of_their_host(receiver):
    opened(receiver).write(make_report())

    points = [one for one in receiver.points if one.name == "hw.power"]
    hosts = {one.attributes["hw.id"]: one.resource.get("host.name") for one in points}
    assert hosts == {"GPU-0": "a", "GPU-1": "b"}
    service = {(one.resource["service.name"], one.resource["effllm.run.id"]) for one in receiver.points}
    assert service == {("effllm", "mine")}
    assert not any("rank" in name for one in receiver.points for name in one.attributes)


def test_every_charted_metric_is_sent_with_its_base(receiver):
    opened(receiver).write(report := complete_report())

    shown = {(one.name, one.attributes.get("effllm.over")): one for one in receiver.points}
    for entry in metrics.METRICS.values():
        name, factor = otlp._name_and_factor(entry)
        for base in entry.bases if entry.chart else ():
            assert shown[name, base].value == pytest.approx(report.values[entry.tag(base)] * factor)
            assert re.fullmatch(r"(\{[a-z]+\}|[A-Za-z1]+)([./](\{[a-z]+\}|[a-z]+))*", shown[name, base].unit)
    tokens = shown["effllm.tokens", None]
    assert (tokens.value, tokens.instrument) == (report.job.counts.tokens, "counter")
    assert shown["effllm.iteration", None].time_ns == int(report.time_s * 10**9)
    assert shown["effllm.throughput.mfu_ratio", "window"].unit == "1"


def test_counter_of_energy_does_not_decrease(receiver):
    sink = opened(receiver, (GPU_0,))
    sink.write(make_report(100))
    sink._run.devices.newest = (msgspec.structs.replace(GPU_0, joules=990.0),)
    sink.write(make_report(110))

    assert values(receiver, "hw.energy") == [1000.0, 1000.0]


def test_reports_within_the_period_are_joined_and_the_last_is_sent(receiver):
    sink = opened(receiver, every=10.0)  # a report is 4.12 s later than the last one
    for iteration in (10, 20, 30, 40, 50):
        sink.write(make_report(iteration))
    sink.close()
    sink.close()

    assert values(receiver, "effllm.iteration") == [10, 40, 50]


def test_quantities_that_are_not_measured_are_not_sent(receiver):
    sink = opened(receiver, (DeviceState("GPU-0", "gpu", "a"),))
    sink.write(make_report(100, job=totals(0), values={"pcu_ratio": float("nan")}, loss=None))

    names = {one.name for one in receiver.points}
    assert not names & {"hw.energy", "hw.power", "effllm.tokens", "effllm.pcu_ratio", "effllm.loss"}


def test_standard_variables_set_endpoint_headers_and_resource(receiver, monkeypatch):
    variables = {
        "EXPORTER_OTLP_ENDPOINT": receiver.url, "EXPORTER_OTLP_HEADERS": "api-key=abc", "SERVICE_NAME": "trainer",
        "RESOURCE_ATTRIBUTES": "team=vision",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    otlp.open_sink(make_run(options={"endpoint": "", "every": 0.0})).write(make_report())

    assert {name.lower(): value for name, value in receiver.headers[0].items()}["api-key"] == "abc"
    assert {(one.resource["service.name"], one.resource["team"]) for one in receiver.points} == {("trainer", "vision")}


def test_failures_have_one_text_until_a_success():
    with closing(Receiver(status=401)) as receiver:
        sink, texts = opened(receiver), set()
        for iteration in (10, 20):
            with pytest.raises(WriteFailed) as error:
                sink.write(make_report(iteration))
            texts.add(str(error.value))
        receiver.status = 200
        sink.write(make_report(30))

    (text,) = texts
    assert "401" in text
    assert values(receiver, "effllm.iteration") == [30]


def sinks_of(receiver):
    return f"console,otlp:endpoint={receiver.url}/v1/metrics:every=0"


def test_energies_of_a_job_are_those_of_its_summary(launch, receiver):
    job = launch.python("loop.py", "--iterations", 60, "--step-s", 0.02, sinks=sinks_of(receiver), run_name="mine")

    summary = job.done().ledger.summary
    energy = {dict(key)["hw.id"]: value for key, value in receiver.newest("hw.energy").items()}
    assert energy == pytest.approx(summary.energy.by_device)
    assert sum(energy.values()) == pytest.approx(summary.energy.measured_joules)
    assert list(receiver.newest("effllm.tokens").values()) == [summary.tokens]
    assert {one.resource["effllm.run.id"] for one in receiver.points} == {"mine"}
    assert summary.left_out == {}


def test_killed_receiver_costs_one_event_and_no_iteration(launch):
    with closing(Receiver()) as receiver:
        job = launch.python("loop.py", "--iterations", 30, "--until", "enough", sinks=sinks_of(receiver))
        jobs.until(lambda: receiver.points)
    jobs.until(lambda: job.ledger.event_texts("sink"))
    job.finish()

    (text,) = {one for one in job.ledger.event_texts("sink") if "failed" in one}
    assert text.startswith("sink otlp failed: WriteFailed")
    assert job.ledger.summary.left_out["otlp"] > 0
    assert job.ledger.summary.status == "completed"


def test_receiver_of_ten_seconds_does_not_delay_the_end(launch):
    with closing(Receiver(pause_s=10.0)) as receiver:
        job = launch.python("loop.py", "--iterations", 40, "--step-s", 0.02, sinks=sinks_of(receiver)).wait()
        ended_s = time.monotonic()
        assert not job.left(), "processes of the job"
        took_s = time.monotonic() - ended_s

    assert took_s < 9.0
    assert job.ledger.summary.iterations == 40
    assert job.ledger.summary.left_out["otlp"] > 0
