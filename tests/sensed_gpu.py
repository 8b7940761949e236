"""A GPU in virtual time: the profile under test switches its load; its sensors use `nvml_library.Gpu`."""

import bisect
import random
from dataclasses import replace as with_traits
from itertools import pairwise

from msgspec.structs import replace
from nvml_library import Gpu

from effllm.records.rank import COUNTER, Device, Sample
from effllm.sensor_profile.record import LoadEdge

NS = 1_000_000_000
BEGIN_S = 1000.0
IDLE_W, LOADED_W = 90.0, 620.0


class Switched:
    """Power with two levels and given edges; replaces a `nvml_library.Curve`."""

    shape = "switched"

    def __init__(self, low=IDLE_W, high=LOADED_W):
        self.low, self.high = low, high
        self._edges_s, self._high_s = [], []

    def switch(self, edges):
        """Set the edges; the power is high after the first edge and low after the second edge, and so on."""
        self._edges_s = [edge.time_ns / NS for edge in edges]
        self._high_s = [0.0]
        for number, (first, second) in enumerate(zip(self._edges_s, self._edges_s[1:], strict=False)):
            self._high_s.append(self._high_s[-1] + (second - first) * (number % 2 == 0))

    def at(self, t):
        return (self.low, self.high)[bisect.bisect_right(self._edges_s, t) % 2]

    def integral(self, t0, t1):
        return self.low * (t1 - t0) + (self.high - self.low) * (self._since(t1) - self._since(t0))

    def mean(self, t0, t1):
        return self.integral(t0, t1) / (t1 - t0) if t0 < t1 else self.at(t1)

    def _since(self, t):
        index = bisect.bisect_right(self._edges_s, t) - 1
        if index < 0:
            return 0.0
        return self._high_s[index] + (t - self._edges_s[index]) * (index % 2 == 0)


class Clock:
    """A clock that only sleeps and reads advance."""

    def __init__(self):
        self.now_ns = round(BEGIN_S * NS)

    def monotonic_ns(self):
        return self.now_ns

    def sleep(self, seconds):
        self.now_ns += round(seconds * NS) + 60_000  # 60 us late, because a kernel also wakes a process late


class SensedGpu:
    """The reader of the GPU, and also its load.

    Args:
        call_s: duration of a read.
        noise_w: standard deviation of the noise of the power reading; each tick has another noise.
        counts: gain of the energy counter only.
        has: the available readings: "energy", "power", "average".
        traits: other fields of `nvml_library.Gpu`.
    """

    name = "a switch"

    def __init__(self, call_s=0.0004, noise_w=0.0, counts=1.0, has=("energy", "power", "average"), **traits):
        self.clock = Clock()
        self.power = Switched()
        origin_s = BEGIN_S - 20.0
        self._gpu = Gpu("GPU-1", **{"power": self.power, "origin_s": origin_s, "power_mode": "held", **traits})
        self._counted = with_traits(self._gpu, gain=self._gpu.gain * counts)
        self._call_s, self._noise_w, self._has = call_s, noise_w, has
        self.device = Device("GPU-1", "traced", "Traced", energy_method=COUNTER, power_limit_w=700.0, driver="570.0")
        self.utilization = 0.0
        self._edges, self._end_ns = [], 0
        self.closed = 0

    # --- readings ---

    def read_energy(self):
        self.clock.now_ns += round(self._call_s * NS / 2)
        at_s = self.clock.now_ns / NS
        sample = Sample(
            self.clock.now_ns,
            energy_j=int(1e3 * self._counted.counter_j(at_s)) / 1e3 if "energy" in self._has else None,
            power_w=round(self._gpu.power_w(at_s) + self._noise(at_s), 3) if "power" in self._has else None,
            power_average_w=round(self._gpu.power_w(at_s, "average"), 3) if "average" in self._has else None,
            energy_only=True,
        )
        self.clock.now_ns += round(self._call_s * NS / 2)
        return sample, {}

    def read(self):
        sample, failures = self.read_energy()
        load = self.power.at(sample.time_ns / NS) > IDLE_W
        gauges = {"sm_clock_hz": 1.98e9, "temperature_c": 70.0 if load else 35.0}
        return replace(
            sample,
            energy_only=False,
            utilization=1.0 if load else self.utilization,
            gauges=gauges,
            throttled_by=("power_cap",) if load else (),
        ), failures

    def _noise(self, at_s):
        if not self._noise_w:
            return 0.0
        return random.Random(self._gpu.last_tick(at_s)).gauss(0.0, self._noise_w)

    # --- load ---

    def start_stretches(self, stretches_s):
        at_ns = self.clock.now_ns + NS // 1000
        for number, stretch_s in enumerate(stretches_s):
            self._edges.append(LoadEdge(at_ns, number % 2 == 0))
            at_ns += round(stretch_s * NS)
        self._edges.append(LoadEdge(at_ns, False))
        edges = pairwise([LoadEdge(0, False), *self._edges])
        self.power.switch([edge for before, edge in edges if edge.is_on != before.is_on])
        self._end_ns = at_ns

    def take_edges(self):
        return self._edges if self.clock.now_ns > self._end_ns else None

    def close(self):
        self.closed += 1
