"""effllm/devices/node: the selection of sensors, the time of opening, and the reasons for unreadable sensors."""

import os
import subprocess
import sys
from functools import partial

import jobs
import pytest
from cases import cases
from nvml_library import Gpu, Trace, flat
from redfish_service import PASSWORD, USER, Service, chassis, supply, tree

from effllm.agent.sampler import Sampler
from effllm.devices import DeviceUnavailable
from effllm.devices import node as node_power
from effllm.devices.node import hwmon, ipmi, rapl


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Make this process find no readable sensors; return the folder that replaces hwmon's folder."""
    nowhere = tmp_path / "nowhere"
    monkeypatch.setattr(rapl, "open_rapl", partial(rapl.open_rapl, powercap=nowhere))
    monkeypatch.setattr(hwmon, "open_reader", partial(hwmon.open_reader, root=tmp_path))
    monkeypatch.setattr(ipmi, "open_reader", partial(ipmi.open_reader, devices=()))
    return tmp_path


def test_none_is_nothing():
    assert node_power.openers("none", "node1") == []


@pytest.mark.parametrize("choice", ["auto", "ipmi", "https://bmc.example/redfish/v1"])
def test_cpu_and_node_sensors_are_read_with_different_periods(choice):
    assert [(opener.name, opener.interval_s) for opener in node_power.openers(choice, "node1")] == [
        ("cpu", 1.0),
        ("psu", 10.0),
    ]


@cases("choice", ["", "Auto", "redfish", "ftp://bmc.example", "bmc.example"])
def test_unknown_node_sensor_is_rejected_with_the_allowed_names(choice):
    with pytest.raises(ValueError, match="auto, none, ipmi, or the URL"):
        node_power.openers(choice, "node1")


def test_no_sensor_is_accessed_before_it_is_opened():
    with Service({}) as service:
        node_power.openers(service.url, "node1")

        assert service.num_connections == 0


def test_reason_is_reported_for_each_unreadable_sensor(bare):
    for opener, why_not in zip(node_power.openers("auto", "node1"), (rapl.NO_RAPL, ipmi.NO_DEVICE), strict=True):
        with pytest.raises(DeviceUnavailable) as caught:
            opener.open()
        assert str(caught.value) == why_not


def test_hwmon_is_used_on_hosts_without_rapl_and_its_failure_is_the_reason(bare):
    chip = bare / "hwmon0" / "device"
    chip.mkdir(parents=True)
    (chip / "power1_oem_info").write_text("Grace Power Socket 0\n")
    (chip / "power1_average").write_text("0\n")
    with pytest.raises(DeviceUnavailable, match="Grace Power Socket 0 shows 0 W"):
        node_power.open_cpu("node1")
    (chip / "power1_average").write_text("104250000\n")

    assert node_power.open_cpu("node1").device.kind == "hwmon"


def test_sensor_choice_auto_never_uses_the_network():
    """In a new interpreter, "auto" opens all its sensors without loading a module for network connections."""
    program = (
        "import contextlib, sys; from effllm import devices\nfrom effllm.devices import node as node_power\n"
        "for opener in node_power.openers('auto', 'node1'):\n"
        "    with contextlib.suppress(devices.DeviceUnavailable): opener.open()\n"
        "print(*(name for name in ('ssl', 'http.client', 'urllib.request') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == ""


def test_node_sensor_is_sampled_like_other_devices(tmp_path):
    file = tmp_path / "bmc"
    file.write_text(f"user = {USER}\npassword = {PASSWORD}\n")
    file.chmod(0o600)
    events = []
    with Service(tree(chassis("1"), supply("1", "PSU0", 937.4))) as service:
        opener = node_power.openers(service.url, "node1", file)[1]
        wake = os.eventfd(0)
        sampler = Sampler(opener.open, 0.01, events.append, wake)
        sampler.start()
        os.eventfd_read(wake)  # returns at the first sample
        samples = sampler.take_samples()
        assert sampler.stop(10.0)
        os.close(wake)

    assert (samples[0].power_w, sampler.device.key) == (937.4, "psu:node1")
    assert events == []
    assert PASSWORD not in repr(sampler.device)


LOOP = "loop.py"
A = Gpu("GPU-aaaa0001-0000-4000-8000-000000000001", "00000000:3B:00.0", power=flat(300.0), tick_s=0.02)


@pytest.fixture
def trace(library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(A)
    return trace


def train(launch, trace, *arguments, **settings):
    aggregator = launch.aggregator(**settings)
    rank = launch.python(
        LOOP,
        *arguments,
        environ=jobs.rank_environ(0, 1) | trace.environment(),
        **{"device": "nvml", "endpoint": aggregator.endpoint, **settings},
    )
    rank.done()
    assert not aggregator.job.left()
    return aggregator.ledger


@pytest.mark.alone
def test_node_power_is_used_if_power_supplies_are_readable(launch, trace):
    with Service(tree(chassis("1"), supply("1", "0", 500.0), supply("1", "1", 400.0)), password=None) as service:
        ledger = train(launch, trace, "--iterations", 150, node_power=service.url)
    summary = ledger.summary

    # The power supplies draw 900 W, which includes the 300 W of the GPU.
    assert summary.energy.scope == "node-psu"
    assert summary.metrics["aec_watts"].value == pytest.approx(900.0, rel=0.01)
    assert summary.energy.method == "instant power"
    (device,) = summary.energy.by_device
    assert device.startswith("psu:")
    # A rank's report has the rank's GPU, and also the energy of the other devices.
    (row, *_) = ledger.ranks
    assert (row.device, [key.partition(":")[0] for key in row.other_devices_j]) == (A.uuid, ["psu"])


@pytest.mark.alone
def test_baseline_power_does_not_change_the_total_energy(launch, trace):
    ledger = train(launch, trace, "--iterations", 100, node_power="none", baseline_seconds=1.0)
    values = {tag: value.value for tag, value in ledger.summary.metrics.items()}

    # The power of the GPU is constant, so all power is baseline power.
    assert values["energy/joules_above_baseline"] == pytest.approx(0.0, abs=0.01 * values["energy/total_joules"])
    assert values["aec_watts"] == pytest.approx(300.0, rel=0.01, abs=2 * ledger.summary.metrics["aec_watts"].error)
