"""The power of a node from its management controller, in-band: the DCMI reading of ipmi-dcmi or ipmitool.

Vendor-specific sensors are not read: only DCMI's reading has the same, though inexact, meaning on all machines.
This file is not tested on real hardware; arguments and output have the form of freeipmi 1.6.10 and ipmitool 1.8.19.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from effllm.devices import DeviceUnavailable
from effllm.devices.node import PSU_INTERVAL_S, NodeReader, node_device
from effllm.records.rank import INSTANT, NODE_PSU, Sensor

DEVICES = (Path("/dev/ipmi0"), Path("/dev/ipmi/0"), Path("/dev/ipmidev/0"))

TIMEOUT_S = 5.0
_ADMIN_FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin"  # not in the PATH of ordinary users

SENSOR = Sensor(
    tick_s=5.0,
    tick_error_s=5.0,
    is_held=True,
    gain_error=0.10,
    source="period and error are assumed, because DCMI does not state them; a period of several seconds is known "
    "(Chameleon Cloud's documentation), and meters of power supplies have errors up to 5 % (Intel E72797-009, "
    "table 17)",
)

NO_DEVICE = (
    "node power: there is no IPMI device (/dev/ipmi0): load the kernel modules ipmi_si and ipmi_devintf; a container "
    "needs --device=/dev/ipmi0; virtual machines have no such device"
)
NO_PERMISSION = (
    "node power: this user may not open {device}; run as root, or let root set the device's group (a udev rule such as "
    'KERNEL=="ipmi*", GROUP="ipmi", MODE="0660"), or let the scheduler\'s prolog open the device to the job '
    "(setfacl -m u:USER:rw {device}); a user with write access can also switch the node off"
)
NO_TOOL = "node power: neither ipmi-dcmi (freeipmi) nor ipmitool is installed"


class Tool(NamedTuple):
    """An executable that prints DCMI's power reading, and the patterns of its output."""

    name: str
    arguments: tuple[str, ...]
    watts: re.Pattern[str]  # its group is the power
    state: re.Pattern[str]  # its group matches only while the measurement is on


TOOLS = (
    Tool(
        "ipmi-dcmi",
        ("--driver-type=OPENIPMI", "--get-system-power-statistics"),
        re.compile(r"^\s*Current Power\s*:\s*(\d+)\s+Watts\s*$", re.IGNORECASE | re.MULTILINE),
        re.compile(r"^\s*Power Measurement\s*:\s*(?:(Active)|.*)$", re.IGNORECASE | re.MULTILINE),
    ),
    Tool(
        "ipmitool",
        ("-I", "open", "dcmi", "power", "reading"),
        re.compile(r"^\s*Instantaneous power reading\s*:\s*(\d+)\s+Watts\s*$", re.IGNORECASE | re.MULTILINE),
        re.compile(r"^\s*Power reading state is\s*:\s*(?:(activated)|.*)$", re.IGNORECASE | re.MULTILINE),
    ),
)


def parse_watts(tool: Tool, text: str) -> float:
    """Return the power in the output of a tool.

    Raises:
        ValueError: the output has no power.
    """
    reading, state = tool.watts.search(text), tool.state.search(text)
    if reading is None:
        raise ValueError(f"{tool.name} shows no power: {_last_line(text)}")
    if state is not None and state[1] is None:
        raise ValueError(f"{tool.name} shows no power: the measurement is off ({state[0].strip()})")
    if int(reading[1]) == 0:  # the controller has the command but no meter
        raise ValueError(f"{tool.name} shows 0 W, which a running node cannot draw")
    return float(reading[1])


def run_tool(arguments: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """Run an executable and return its output, including error messages.

    Raises:
        OSError: the executable cannot be started, failed, or timed out.
    """
    name = Path(arguments[0]).name
    with subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            raise TimeoutError(f"{name} did not answer within {timeout_s:g} s") from None
    text = output.decode(errors="replace")
    if process.returncode:
        raise OSError(f"{name} failed ({process.returncode}): {_last_line(text)}")
    return text


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


def open_reader(
    host: str,
    devices: Sequence[Path] = DEVICES,
    which: Callable[[str], str | None] = lambda name: shutil.which(name) or shutil.which(name, path=_ADMIN_FOLDERS),
    timeout_s: float = TIMEOUT_S,
) -> NodeReader:
    """Open the node's power with the first tool that prints it.

    Raises:
        DeviceUnavailable: a device, a permission, or a tool that prints power is missing.
    """
    present = [device for device in devices if device.exists()]
    if not present:
        raise DeviceUnavailable(NO_DEVICE)
    if not os.access(present[0], os.R_OK | os.W_OK):
        raise DeviceUnavailable(NO_PERMISSION.format(device=present[0]))
    why_not = []
    for tool in TOOLS:
        executable = which(tool.name)
        if executable is None:
            continue
        measure, began_s = partial(_measure, tool, executable, timeout_s), time.monotonic()
        try:
            measure()
        except (OSError, ValueError) as error:
            why_not.append(str(error))
            continue
        return _make_reader(host, tool, measure, time.monotonic() - began_s)
    raise DeviceUnavailable(f"node power: {'; '.join(why_not)}" if why_not else NO_TOOL)


def _measure(tool: Tool, executable: str, timeout_s: float) -> float:
    return parse_watts(tool, run_tool([executable, *tool.arguments], timeout_s))


def _make_reader(host: str, tool: Tool, measure: Callable[[], float], call_s: float) -> NodeReader:
    device = node_device(
        host,
        NODE_PSU,
        kind="ipmi",
        name="node",
        energy_method=INSTANT,
        energy_note="DCMI's power reading in whole watts: the vendor chooses its source; on some boards it excludes "
        "GPUs, fans or the losses of the power supplies",
        sensor=msgspec.structs.replace(SENSOR, call_s=call_s),
        driver=tool.name,
    )
    return NodeReader(device, PSU_INTERVAL_S, measure)
