"""effllm/devices/node/ipmi.py with fake tools that print the output of ipmi-dcmi 1.6.10 and ipmitool 1.8.19."""

import os
import time

import jobs
import pytest

from effllm.devices import DeviceUnavailable
from effllm.devices.node.ipmi import NO_DEVICE, NO_TOOL, open_reader

IPMI_DCMI = """
Current Power                        : 332 Watts
Minimum Power over sampling duration : 68 watts
Maximum Power over sampling duration : 504 watts
Average Power over sampling duration : 348 watts
Time Stamp                           : 11/03/2023 - 08:36:29
Statistics reporting time period     : 2685198000 milliseconds
Power Measurement                    : Active
"""

IPMITOOL = """
    Instantaneous power reading:                   173 Watts
    Minimum during sampling period:                  0 Watts
    Maximum during sampling period:               1023 Watts
    Average power reading over sample period:      138 Watts
    IPMI timestamp:                           Thu Aug  1 13:46:34 2024
    Sampling period:                          00010824 Seconds.
    Power reading state is:                   activated

"""


class Tools:
    """A folder of fake executables, and an empty file as the IPMI device."""

    def __init__(self, root):
        self.root = root
        self.device = root / "ipmi0"
        self.device.touch()
        self.folder = root / "a folder; touch surprise"
        self.folder.mkdir()

    def put(self, name, body):
        tool = self.folder / name
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
        return tool

    def add_output(self, name, text, status=0):
        """Write a tool that prints ``text`` for all arguments."""
        answer = self.root / f"{name}.txt"
        answer.write_text(text)
        return self.put(name, f"cat '{answer}'; exit {status}")

    def which(self, name):
        return str(self.folder / name) if (self.folder / name).exists() else None

    def open(self, timeout_s=5.0):
        return open_reader("node1", [self.device], self.which, timeout_s)

    def why_not(self, timeout_s=5.0):
        with pytest.raises(DeviceUnavailable) as caught:
            self.open(timeout_s)
        return str(caught.value)


@pytest.fixture
def tools(tmp_path):
    return Tools(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "watts"),
    [
        ("ipmi-dcmi", IPMI_DCMI, 332.0),
        ("ipmitool", IPMITOOL, 173.0),
        ("ipmitool", "IANA PEN registry open failed: No such file or directory\n" + IPMITOOL, 173.0),
    ],
    ids=["ipmi-dcmi", "ipmitool", "after a warning"],
)
def test_current_power_is_read_and_not_the_mean_since_boot(tools, name, text, watts):
    tools.add_output(name, text)
    sample, failures = tools.open().read()

    assert (sample.power_w, sample.energy_j, failures) == (watts, None, {})


def test_device_measures_node_power_with_a_note_on_its_limits(tools):
    tools.add_output("ipmi-dcmi", IPMI_DCMI)
    reader = tools.open()
    device = reader.device

    assert (device.key, device.kind, device.driver) == ("psu:node1", "ipmi", "ipmi-dcmi")
    assert (device.energy_method, device.power_scope, device.only_power) == ("instant power", "node-psu", True)
    assert "excludes" in device.energy_note
    assert (reader.interval_s, device.sensor.tick_s, device.sensor.gain_error) == (10.0, 5.0, 0.10)
    assert 0 < device.sensor.call_s < 5


def test_tools_are_called_only_to_read_power_from_the_kernel_driver(tools):
    commands = tools.root / "arguments"
    tools.put("ipmi-dcmi", f"echo \"$@\" >> '{commands}'; exit 1")
    tools.put("ipmitool", f"echo \"$@\" >> '{commands}'; exit 1")
    tools.why_not()

    assert commands.read_text().splitlines() == [
        "--driver-type=OPENIPMI --get-system-power-statistics",
        "-I open dcmi power reading",
    ]
    assert not (tools.root / "surprise").exists()


def test_second_tool_is_used_if_the_first_has_no_reading(tools):
    tools.add_output("ipmi-dcmi", "ipmi-dcmi: command not supported\n", 1)
    tools.add_output("ipmitool", IPMITOOL)

    assert tools.open().device.driver == "ipmitool"


@pytest.mark.parametrize(
    ("tool", "text", "reason"),
    [
        ("ipmi-dcmi", IPMI_DCMI.replace("Active", "Not Available"), "the measurement is off"),
        ("ipmi-dcmi", IPMI_DCMI.replace("332 Watts", "0 Watts"), "shows 0 W, which a running node cannot draw"),
        ("ipmi-dcmi", "could not find inband device\n", "shows no power: could not find inband device"),
        ("ipmi-dcmi", "", "shows no power: it printed nothing"),
        ("ipmi-dcmi", "Current Power : many Watts\n", "shows no power: Current Power : many Watts"),
        ("ipmi-dcmi", "\0\xff" * 100, "shows no power"),
        ("ipmitool", IPMITOOL.replace("activated", "deactivated"), "the measurement is off"),
    ],
    ids=["off", "0 W", "no device", "empty", "no number", "binary", "ipmitool off"],
)
def test_output_without_a_reading_is_rejected_with_a_reason(tools, tool, text, reason):
    tools.add_output(tool, text)

    assert reason in tools.why_not()


def test_failure_of_a_tool_affects_only_one_reading(tools):
    tools.add_output("ipmi-dcmi", IPMI_DCMI)
    reader = tools.open()
    tools.add_output("ipmi-dcmi", "ipmi-dcmi: driver busy\n", 1)
    failed, failures = reader.read()
    tools.add_output("ipmi-dcmi", IPMI_DCMI)
    sample, _ = reader.read()

    assert (failed.power_w, failures) == (None, {"power_w": "ipmi: ipmi-dcmi failed (1): ipmi-dcmi: driver busy"})
    assert sample.power_w == 332.0


def test_hanging_tool_and_its_children_are_killed_at_the_timeout(tools):
    tools.put("ipmi-dcmi", "sleep 600 & sleep 600")
    began_s = time.monotonic()
    why_not = tools.why_not(timeout_s=0.3)

    assert why_not == "node power: ipmi-dcmi did not answer within 0.3 s"
    assert time.monotonic() - began_s < 20.0
    assert jobs.wait_until_gone(lambda: set(jobs.processes_of_session()) - {os.getpid()}, within_s=30.0) == set()


@pytest.mark.parametrize(
    "body", [f"sleep 600 &\necho '{IPMI_DCMI}'", "exec >/dev/null 2>&1; sleep 600"], ids=["child", "closed output"]
)
def test_process_of_a_tool_that_remains_does_not_block(tools, body):
    tools.put("ipmi-dcmi", body)

    assert "did not answer within 0.3 s" in tools.why_not(timeout_s=0.3)


def test_missing_device_is_reported_with_advice(tools):
    tools.device.unlink()

    assert tools.why_not() == NO_DEVICE


def test_unreadable_device_is_reported_with_three_ways_to_open_it(tools, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # file modes have no effect if the tests run as root
    text = tools.why_not()

    assert str(tools.device) in text
    for way in ("run as root", 'GROUP="ipmi"', "setfacl"):
        assert way in text
    assert "switch the node off" in text


def test_missing_tools_are_reported_with_the_package_to_install(tools):
    assert tools.why_not() == NO_TOOL


def test_ipmi_tools_are_found_on_the_path(tools, monkeypatch):
    tools.add_output("ipmitool", IPMITOOL)
    monkeypatch.setenv("PATH", f"{tools.folder}:{os.environ['PATH']}")

    assert open_reader("node1", [tools.device]).device.driver == "ipmitool"
