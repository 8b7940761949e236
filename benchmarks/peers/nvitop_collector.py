"""nvitop: `ResourceMetricCollector` at its default interval; energy is its mean power times its duration.

A window starts with the call of `activate`; its duration is reported by nvitop with the means.
"""

from __future__ import annotations

from importlib.metadata import version

from nvitop import Device, ResourceMetricCollector

from benchmarks.energy_driver import Calls, Reading, Tool, drive


class Nvitop(Tool):
    """One collector of all GPUs."""

    name = "nvitop"
    version = version("nvitop")

    def __init__(self, gpus: int) -> None:
        self._gpus = range(gpus)
        self._collector = ResourceMetricCollector(Device.all())
        self._collector.activate("run")  # the collector's thread samples from now on, also between windows
        self._said: dict[int, dict[str, float]] = {}

    def begin(self, key: int) -> None:
        """Open a collection inside the running collection."""
        self._collector.activate(f"window-{key}")

    def end(self, key: int) -> None:
        said = self._collector.collect()
        self._collector.deactivate(f"window-{key}")
        self._said[key] = {name.removeprefix(f"run/window-{key}/"): value for name, value in said.items()}

    def reading(self, key: int, calls: Calls) -> Reading:
        """Return mean power times duration."""
        said = self._said[key]
        duration_s = said["duration (s)"]
        joules = [said[f"gpu:{index}/power_usage (W)/mean"] * duration_s for index in self._gpus]
        return Reading(calls.begin_ns, calls.begin_ns + int(duration_s * 1e9), list(joules))

    def close(self) -> None:
        self._collector.deactivate("run")


if __name__ == "__main__":
    drive(Nvitop)
