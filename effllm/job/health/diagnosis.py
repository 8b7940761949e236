"""Finds the reason of a slow rank: compares the rank's device with devices of its peers and of its node. No I/O.

A waiting rank spins in a communication kernel, at full utilization, full clock and low power. So a low clock, a clocks
event reason that the peers do not have, a lower power limit or an idle GPU indicate the slow rank. If no reading
differs, the reason is "unknown".  Readings are compared over all windows so far, because a clock may be low by chance
in a single window.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct

from effllm.records.rank import DeviceWindow

UNKNOWN = "unknown"

#: Kinds of differences, as in `StragglerVerdict.differences`.
CLOCK, THROTTLED, POWER_LIMIT, HOST = "clock", "throttled", "power_limit", "host"

#: Maximum number of compared peers: their median is as good as the median of all peers.
MAX_PEERS = 64

#: Minimum differences from the peers, in this order: SM clock (relative), power limit (relative), throttled share of
#: time, busy share of time, and temperature in degrees.
SLOWER_CLOCK, LOWER_LIMIT, OFTENER_THROTTLED, IDLER, HOTTER_C = 0.02, 0.02, 0.1, 0.05, 8.0

#: Smallest part of a slowdown that a lower clock must explain to be its reason.
MIN_EXPLAINED = 0.5

#: Display names of clocks event reasons.
REASONS = {
    "power_cap": "power cap",
    "hw_slowdown": "hardware slowdown",
    "sync_boost": "sync boost",
    "sw_thermal": "thermal slowdown",
    "hw_thermal": "thermal slowdown by hardware",
    "power_brake": "power brake",
    "board_limit": "limit of the board's power supply",
    "reliability": "limit of the voltage",
}

#: Names of the compared readings; the readings of clocks event reasons have the prefix.
_CLOCK, _LIMIT, _CELSIUS, _BUSY, _REASON = "sm_clock_hz", "power_limit_w", "temperature_c", "utilization", "reason "


class Reason(NamedTuple):
    """The differences between the device of a slow rank and the devices of its peers."""

    text: str
    kinds: tuple[str, ...] = ()


NO_REASON = Reason(UNKNOWN)


class ReadingSums(Struct):
    """One reading of a slow rank and of its peers: sums over windows of the value times the weight of the window."""

    weight: float = 0.0
    own: float = 0.0
    peers: float = 0.0
    node_weight: float = 0.0  # windows in which other devices of the node have this reading
    node: float = 0.0

    @property
    def means(self) -> tuple[float, float]:
        """Mean of the slow rank, and mean of the peers' medians."""
        return self.own / self.weight, self.peers / self.weight

    @property
    def node_mean(self) -> float | None:
        return self.node / self.node_weight if self.node_weight else None


class ComparedReadings:
    """The readings of one slow rank and of its peers, over the windows so far."""

    def __init__(self) -> None:
        self._by_name: dict[str, ReadingSums] = {}

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def find(self, name: str) -> ReadingSums | None:
        return self._by_name.get(name)

    def add(self, name: str, weight: float, own: float | None, peers: float | None, node: float | None = None) -> None:
        """Add a reading of a window; nothing is added if the slow rank or its peers do not have the reading."""
        if own is None or peers is None or weight <= 0:
            return
        known = self._by_name.setdefault(name, ReadingSums())
        known.weight += weight
        known.own += weight * own
        known.peers += weight * peers
        if node is not None:
            known.node_weight += weight
            known.node += weight * node

    def add_windows(self, own: DeviceWindow, peers: Sequence[DeviceWindow], node: Sequence[DeviceWindow] = ()) -> None:
        """Add one window.

        Args:
            own: window of the slow rank's device.
            peers: windows of devices whose ranks do the same work.
            node: windows of the other devices on the same host, without devices of slow ranks.
        """
        for name in (_CLOCK, _LIMIT, _CELSIUS):
            gauge = own.gauges.get(name)
            if gauge is not None:
                values = (mean_of(own, name), _median(peers, mean_of, name), _median(node, mean_of, name))
                self.add(name, gauge.covered_s, *values)
        self.add(_BUSY, own.wall.utilization_covered_s, _utilization(own), _median(peers, _utilization))
        # A reason that is not active now counts with its share of 0.
        known = (name.removeprefix(_REASON) for name in self._by_name if name.startswith(_REASON))
        for reason in {*REASONS, *own.throttled_s, *known} - {"any"}:
            share, others = _throttled(own, reason), _median(peers, _throttled, reason)
            self.add(_REASON + reason, own.throttle_covered_s, share, others)

    def reason(self, is_gpu: bool = True, slowdown: float = 0.0) -> Reason:
        """Return the differences between a slow rank's device and other devices, or `NO_REASON`.

        Args:
            is_gpu: whether the device is a GPU, which is idle while its host is slow.
            slowdown: time of the slow rank over the time of its peers, minus one.
        """
        differences = {CLOCK: self._clock(), THROTTLED: self._reasons(), POWER_LIMIT: self._limit()}
        kinds = tuple(kind for kind, texts in differences.items() if texts)
        if CLOCK in kinds and not self._clock_explains(slowdown):
            kinds = tuple(kind for kind in kinds if kind != CLOCK)
        found = [text for texts in differences.values() for text in texts]
        found += self._temperature() if found else []
        if not found and is_gpu and (found := self._host()):
            kinds = (HOST,)
        return Reason(", ".join(found), kinds) if found else NO_REASON

    def _clock(self) -> list[str]:
        reading = self.find(_CLOCK)
        if reading is None or reading.means[0] >= (1 - SLOWER_CLOCK) * reading.means[1]:
            return []
        (own, peers), node = reading.means, reading.node_mean
        also = " (also low on other GPUs of the node)" if node is not None and node < (1 - SLOWER_CLOCK) * peers else ""
        return [f"SM clock {own / 1e9:.2f} GHz against {peers / 1e9:.2f}{also}"]

    def _clock_explains(self, slowdown: float) -> bool:
        """Whether the lower clock can cause at least `MIN_EXPLAINED` of the slowdown: clocks of equal GPUs differ."""
        reading = self.find(_CLOCK)
        return reading is not None and reading.own > 0 and reading.peers / reading.own - 1 >= MIN_EXPLAINED * slowdown

    def _reasons(self) -> list[str]:
        found = []
        for name, reading in sorted(self._by_name.items()):
            reason = name.removeprefix(_REASON)
            if name.startswith(_REASON) and reading.means[0] >= reading.means[1] + OFTENER_THROTTLED:
                found.append(REASONS.get(reason, reason.replace("_", " ")))
        return found

    def _limit(self) -> list[str]:
        reading = self.find(_LIMIT)
        if reading is None or reading.means[0] >= (1 - LOWER_LIMIT) * reading.means[1]:
            return []
        return ["power limit {:.0f} W against {:.0f}".format(*reading.means)]

    def _temperature(self) -> list[str]:
        reading = self.find(_CELSIUS)
        if reading is None or reading.means[0] < reading.means[1] + HOTTER_C:
            return []
        (own, peers), node = reading.means, reading.node_mean
        also = " (also high on other GPUs of the node)" if node is not None and node >= peers + HOTTER_C else ""
        return [f"{own:.0f} degC against {peers:.0f}{also}"]

    def _host(self) -> list[str]:
        reading = self.find(_BUSY)
        if reading is None or reading.means[0] > reading.means[1] - IDLER:
            return []
        own, peers = reading.means
        return [f"slow host: the GPU is busy {100 * own:.0f} % of the time, GPUs of peers {100 * peers:.0f} %"]


def mean_of(window: DeviceWindow, name: str) -> float | None:
    gauge = window.gauges.get(name)
    return gauge.value_seconds / gauge.covered_s if gauge is not None and gauge.covered_s > 0 else None


def power_w(window: DeviceWindow) -> float | None:
    energy = window.wall.energy
    return energy.joules / energy.covered_s if energy.joules is not None and energy.covered_s > 0 else None


def _utilization(window: DeviceWindow) -> float | None:
    wall = window.wall
    known = wall.utilization_seconds is not None and wall.utilization_covered_s > 0
    return wall.utilization_seconds / wall.utilization_covered_s if known else None  # type: ignore[operator]


def _throttled(window: DeviceWindow, reason: str) -> float | None:
    if window.throttle_covered_s <= 0:
        return None
    return window.throttled_s.get(reason, 0.0) / window.throttle_covered_s


def _median(windows: Sequence[DeviceWindow], reading: Callable[..., float | None], *names: str) -> float | None:
    values = [value for window in windows[:MAX_PEERS] if (value := reading(window, *names)) is not None]
    return statistics.median(values) if values else None
