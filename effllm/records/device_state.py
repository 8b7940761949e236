"""The newest state of each device, for sinks that write values of single devices."""

from __future__ import annotations

from msgspec import Struct

#: Kinds of devices in a `DeviceState`.
GPU_KIND, CPU_KIND, MODULE_KIND, NODE_KIND = "gpu", "cpu", "module", "node"


class DeviceState(Struct, frozen=True, gc=False):
    """A device in the newest window, and its energy so far; ``None`` means not measured."""

    key: str  # key of the device; with a common energy key, the key of the energy
    kind: str  # GPU_KIND, CPU_KIND, MODULE_KIND (GPU, CPU and memory together) or NODE_KIND (the whole node)
    host: str = ""  # empty for a device of an earlier attempt
    name: str = ""
    driver: str = ""
    joules: float | None = None  # as in summary.json; None: not a part of the job's energy
    power_w: float | None = None  # mean over the newest window
    utilization: float | None = None  # mean over the newest window, 0..1
    memory_bytes: float | None = None  # mean over the newest window
    memory_total_bytes: int | None = None
    temperature_c: float | None = None  # mean over the newest window


class DeviceFeed:
    """Passes the newest states from the aggregator's thread to the threads of sinks."""

    def __init__(self, is_wanted: bool = False) -> None:
        self.is_wanted = is_wanted  # False: no sink uses the states, so they are not made
        self.newest: tuple[DeviceState, ...] = ()
