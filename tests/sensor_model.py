"""A model of a GPU's power sensor and of its agent, in virtual time; the true energy has a closed form."""

from __future__ import annotations

import bisect
import functools
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

from effllm.energy.device_energy import EnergyLedger
from effllm.records.energy import EnergyAmount
from effllm.records.rank import COUNTER, Device, Sample, Sensor

if TYPE_CHECKING:
    from nvml_library import Curve

NS = 1_000_000_000
BEGIN_S = 1000.0
EDGE_WAIT_S = 1.0  # as in effllm/agent/track.py
HORIZON_S = 5000.0  # length of a telegraph signal

Power: TypeAlias = "Curve | Telegraph"


@dataclass(frozen=True)
class Telegraph:
    """Power that changes between two levels at random times."""

    low: float
    high: float
    mean_s: float  # mean time on one level
    seed: int = 0

    def at(self, t: float) -> float:
        """Return the watts at a moment."""
        switches, _ = _switches(self.mean_s, self.seed)
        return (self.low, self.high)[bisect.bisect_right(switches, t) % 2]

    def integral(self, t0: float, t1: float) -> float:
        """Return the joules between two moments."""
        return self.low * (t1 - t0) + (self.high - self.low) * (self._high_s(t1) - self._high_s(t0))

    def _high_s(self, t: float) -> float:
        switches, high_s = _switches(self.mean_s, self.seed)
        index = bisect.bisect_right(switches, t)
        return high_s[index] + ((t - switches[index - 1]) if index % 2 else 0.0)


@functools.lru_cache
def _switches(mean_s: float, seed: int) -> tuple[list[float], list[float]]:
    """Return the times of the switches (first: to the high level), and the time on the high level before each
    switch."""
    chance = random.Random(seed)
    switches = [0.0]
    while switches[-1] < HORIZON_S:
        switches.append(switches[-1] + chance.expovariate(1 / mean_s))
    highs = [second - first if i % 2 == 0 else 0.0 for i, (first, second) in enumerate(pairwise(switches))]
    return switches, [0.0, *accumulate([0.0, *highs])]


@dataclass
class BoardSensor:
    """A sensor that uses the power in the last part of each tick for the whole tick; it updates at ticks, with a lag.

    Args:
        power: true power.
        tick_s: time between two updates.
        duty: share of each tick that is measured.
        phase_s: time of a tick, modulo ``tick_s``.
        lag_s: age of the value that the counter shows.
        gain: factor of all readings of the sensor.
    """

    power: Power
    tick_s: float = 0.1
    duty: float = 1.0
    phase_s: float = 0.0
    lag_s: float = 0.0
    gain: float = 1.0
    _sums: list[float] = field(default_factory=lambda: [0.0])

    def counter_j(self, t: float) -> float:
        """Return the energy counter, in whole millijoules."""
        tick = self._tick(t - self.lag_s)
        while len(self._sums) <= tick:
            self._sums.append(self._sums[-1] + self._mean_w(len(self._sums)) * self.tick_s)
        return math.floor(1e3 * self._sums[tick]) / 1e3

    def power_w(self, t: float) -> float:
        """Return the last measured power."""
        return self._mean_w(self._tick(t))

    def known(self, chance: random.Random, lag_is_known: bool = True) -> Sensor:
        """Return the result of a calibration of this sensor."""
        # The mean time of the measured part is after the middle of the tick, by (1 - duty) * tick / 2.
        late_s = self.lag_s - (1 - self.duty) * self.tick_s / 2
        return Sensor(
            tick_s=self.tick_s * (1 + chance.uniform(-1e-4, 1e-4)),
            tick_error_s=2e-4 * self.tick_s,
            lag_s=late_s if lag_is_known else 0.0,
            lag_error_s=0.0 if lag_is_known else self.tick_s,
            duty=self.duty,
            is_held=True,
        )

    def _tick(self, t: float) -> int:
        return max(math.floor((t - BEGIN_S + 10.0 - self.phase_s) / self.tick_s), 0)

    def _mean_w(self, tick: int) -> float:
        end_s = BEGIN_S - 10.0 + self.phase_s + tick * self.tick_s
        measured_s = self.duty * self.tick_s
        return self.gain * self.power.integral(end_s - measured_s, end_s) / measured_s


class VirtualAgent:
    """Reads a sensor every second and when the ledger requests it; ends a window when its edge is settled."""

    def __init__(
        self, ledger: EnergyLedger, sensor: BoardSensor, chance: random.Random, interval_s: float = 1.0
    ) -> None:
        self._ledger, self._sensor, self._chance, self._interval_s = ledger, sensor, chance, interval_s
        self._newest_ns = 0

    def read(self, at_s: float) -> None:
        """Read the sensor 0.05 to 0.4 ms after this time."""
        at_s += self._chance.uniform(5e-5, 4e-4)
        time_ns = round(at_s * NS)
        if time_ns > self._newest_ns:
            self._newest_ns = time_ns
            at_s = time_ns / NS
            self._ledger.add(Sample(time_ns, power_w=self._sensor.power_w(at_s), energy_j=self._sensor.counter_j(at_s)))

    def calibrate(self, at_s: float) -> float:
        """Read 24 times per tick for 1.3 ticks; return the time after the last read."""
        end_s = at_s + 1.3 * self._sensor.tick_s
        while at_s < end_s:
            self.read(at_s)
            at_s += self._sensor.tick_s / 24
        return end_s

    def windows(self, edges_s: Sequence[float]) -> list[EnergyAmount]:
        """Return the energy between each edge and the next edge."""
        due = [(edges_s[0] - 2.0, "read"), *((edge_s, "edge") for edge_s in edges_s)]
        heapq.heapify(due)
        waiting: deque[int] = deque()
        cut_ns: list[int] = []
        found = []
        while len(cut_ns) < len(edges_s):
            now_s, what = heapq.heappop(due)
            if what == "edge":
                edge_ns = round(now_s * NS)
                waiting.append(edge_ns)
                for time_ns in self._ledger.timing.reads_for(edge_ns):
                    heapq.heappush(due, (max(time_ns / NS, now_s + 2e-4), "asked"))
            else:
                self.read(now_s)
                if what == "read":
                    heapq.heappush(due, (now_s + self._interval_s, "read"))
            while waiting and (self._ledger.is_settled(waiting[0]) or now_s > waiting[0] / NS + EDGE_WAIT_S):
                edge_ns = waiting.popleft()
                if cut_ns:
                    found.append(self._ledger.energy(cut_ns[-1], edge_ns))
                self._ledger.forget_before(edge_ns)
                cut_ns.append(edge_ns)
        return found


def ledger_of(sensor: Sensor, **known: object) -> EnergyLedger:
    """Return the ledger of a GPU with a counter and a limit of 700 W."""
    facts = {"energy_method": COUNTER, "power_limit_w": 700.0, **known}
    return EnergyLedger(Device("GPU-0", "nvml", sensor=sensor, **facts), max_gap_s=5.0)  # type: ignore[arg-type]


@dataclass(frozen=True)
class MeasuredWindow:
    """A window with the energy from the ledger and the true energy."""

    energy: EnergyAmount
    truth_j: float

    @property
    def error_j(self) -> float:
        """The error of the ledger's energy."""
        assert self.energy.joules is not None
        return self.energy.joules - self.truth_j

    @property
    def deviation_j(self) -> float:
        """The standard deviation that the ledger states for its energy."""
        return math.sqrt(self.energy.start_j2 + self.energy.end_j2 + self.energy.inside_j2)


def simulate(
    power: Power,
    seed: int,
    *,
    tick_s: float = 0.1,
    duty: float = 1.0,
    window_s: float = 1.0,
    count: int = 40,
    lag_is_known: bool = True,
    lag_s: float = 0.0,
    name: str = "",
    lead_s: Sequence[float] = (),
    step_s: float = 0.0,
    board: Callable[..., BoardSensor] = BoardSensor,
) -> list[MeasuredWindow]:
    """Return ``count`` windows of about ``window_s``; windows of ``lead_s`` come before them. The sensor has a random
    phase.

    ``step_s``: duration of an iteration that the agent sets in the ledger; 0 sets none.
    """
    chance = random.Random(seed)
    sensor = board(power, tick_s, duty, chance.uniform(0, tick_s), lag_s)
    ledger = ledger_of(sensor.known(chance, lag_is_known), name=name)
    if step_s > 0:
        ledger.aliasing.set_durations([step_s])
    agent = VirtualAgent(ledger, sensor, chance)
    edges_s = [agent.calibrate(BEGIN_S) + 2.5]
    for length_s in [*lead_s, *[window_s] * count]:
        edges_s.append(edges_s[-1] + length_s * chance.uniform(0.9, 1.1))
    truths = [power.integral(start_s, end_s) for start_s, end_s in pairwise(edges_s)]
    found = [MeasuredWindow(energy, truth_j) for energy, truth_j in zip(agent.windows(edges_s), truths, strict=True)]
    return found[len(lead_s) :]
