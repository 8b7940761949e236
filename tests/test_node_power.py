"""effllm/node_power: what is chosen, when it is touched, and what is said of what cannot be read."""

import os
import subprocess
import sys
from functools import partial

import pytest
from redfish_service import PASSWORD, USER, Service, chassis, supply, tree

from effllm import node_power
from effllm.agents.sampler import Sampler
from effllm.devices import DeviceUnavailable
from effllm.node_power import hwmon, ipmi, rapl


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine on which nothing can be read, wherever the tests run; its hwmon is in the folder."""
    nowhere = tmp_path / "nowhere"
    monkeypatch.setattr(rapl, "open_rapl", partial(rapl.open_rapl, powercap=nowhere, perf=nowhere))
    monkeypatch.setattr(hwmon, "open_reader", partial(hwmon.open_reader, root=tmp_path))
    monkeypatch.setattr(ipmi, "open_reader", partial(ipmi.open_reader, devices=()))
    return tmp_path


def test_none_is_nothing():
    assert node_power.openers("none", "node1") == []


@pytest.mark.parametrize("choice", ["auto", "ipmi", "https://bmc.example/redfish/v1"])
def test_the_cpus_and_the_node_are_two_sensors_with_periods_of_their_own(choice):
    assert [(opener.name, opener.interval_s) for opener in node_power.openers(choice, "node1")] == [
        ("cpu", 1.0),
        ("psu", 10.0),
    ]


@pytest.mark.parametrize("choice", ["", "Auto", "redfish", "ftp://bmc.example", "bmc.example"])
def test_another_choice_is_refused_with_what_is_allowed(choice):
    with pytest.raises(ValueError, match="auto, none, ipmi, or the URL"):
        node_power.openers(choice, "node1")


def test_nothing_is_touched_before_it_is_opened():
    with Service({}) as service:
        node_power.openers(service.url, "node1")

        assert service.num_connections == 0


def test_what_cannot_be_read_is_told_in_a_sentence_each(bare):
    for opener, why_not in zip(node_power.openers("auto", "node1"), (rapl.NO_RAPL, ipmi.NO_DEVICE), strict=True):
        with pytest.raises(DeviceUnavailable) as caught:
            opener.open()
        assert str(caught.value) == why_not


def test_where_hwmon_has_a_sensor_that_fails_its_reason_is_told_and_not_rapls(bare):
    chip = bare / "hwmon0" / "device"
    chip.mkdir(parents=True)
    (chip / "power1_oem_info").write_text("Grace Power Socket 0\n")
    (chip / "power1_average").write_text("0\n")
    with pytest.raises(DeviceUnavailable, match="Grace Power Socket 0 shows 0 W"):
        node_power.open_cpu("node1")


def test_hwmon_is_read_where_there_is_no_rapl(bare):
    chip = bare / "hwmon0" / "device"
    chip.mkdir(parents=True)
    (chip / "power1_oem_info").write_text("Grace Power Socket 0\n")
    (chip / "power1_average").write_text("104250000\n")

    assert node_power.open_cpu("node1").device.kind == "hwmon"


def test_auto_never_uses_the_network():
    """A fresh interpreter that opens everything that auto does has not even loaded what could connect."""
    program = (
        "import contextlib, sys; from effllm import devices, node_power\n"
        "for opener in node_power.openers('auto', 'node1'):\n"
        "    with contextlib.suppress(devices.DeviceUnavailable): opener.open()\n"
        "print(*(name for name in ('ssl', 'http.client', 'urllib.request') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == ""


def test_a_sensor_of_the_node_is_sampled_as_any_device(tmp_path):
    file = tmp_path / "bmc"
    file.write_text(f"user = {USER}\npassword = {PASSWORD}\n")
    file.chmod(0o600)
    events = []
    with Service(tree(chassis("1"), supply("1", "PSU0", 937.4))) as service:
        opener = node_power.openers(service.url, "node1", file)[1]
        wake = os.eventfd(0)
        sampler = Sampler(opener.open, 0.01, events.append, wake)
        sampler.start()
        os.eventfd_read(wake)  # returns with the first sample
        samples = sampler.take()
        assert sampler.stop(10.0)
        os.close(wake)

    assert (samples[0].power_w, sampler.device.key) == (937.4, "psu:node1")
    assert events == []
    assert PASSWORD not in repr(sampler.device)
