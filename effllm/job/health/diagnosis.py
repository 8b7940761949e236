"""Finds the reason of a slow rank: compares the rank's device with devices of its peers and of its node. No I/O.

A waiting rank spins in a communication kernel, at full utilization, full clock and low power. So a low clock, a clocks
event reason that the peers do not have, a lower power limit or an idle GPU indicate the slow rank. If no reading
differs, the reason is "unknown".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
}


class Reason(NamedTuple):
    """The differences between the device of a slow rank and the devices of its peers."""

    text: str
    kinds: tuple[str, ...] = ()


NO_REASON = Reason(UNKNOWN)


def explain(
    own: DeviceWindow | None,
    peers: Sequence[DeviceWindow],
    node: Sequence[DeviceWindow] = (),
    is_gpu: bool = True,
    slowdown: float = 0.0,
) -> Reason:
    """Return the differences between a slow rank's device and other devices, or `NO_REASON`.

    Args:
        own: window of the slow rank's device.
        peers: windows of devices whose ranks do the same work.
        node: windows of the other devices on the same host, without devices of slow ranks.
        is_gpu: whether the device is a GPU, which is idle while its host is slow.
        slowdown: time of the slow rank over the time of its peers, minus one.
    """
    if own is None or not peers:
        return NO_REASON
    differences = {
        CLOCK: _clock(own, peers, node), THROTTLED: _reasons(own, peers), POWER_LIMIT: _limit(own, peers)
    }  # fmt: skip
    kinds = tuple(kind for kind, texts in differences.items() if texts)
    if CLOCK in kinds and not _clock_explains(own, peers, slowdown):
        kinds = tuple(kind for kind in kinds if kind != CLOCK)
    found = [text for texts in differences.values() for text in texts]
    found += _temperature(own, peers, node) if found else []
    if not found and is_gpu and (found := _host(own, peers)):
        kinds = (HOST,)
    return Reason(", ".join(found), kinds) if found else NO_REASON


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


def _median(windows: Sequence[DeviceWindow], reading: Callable[[DeviceWindow], float | None]) -> float | None:
    values = [value for window in windows[:MAX_PEERS] if (value := reading(window)) is not None]
    return statistics.median(values) if values else None


def _pair(
    own: DeviceWindow, peers: Sequence[DeviceWindow], reading: Callable[[DeviceWindow], float | None]
) -> tuple[float, float] | None:
    mine, theirs = reading(own), _median(peers, reading)
    return None if mine is None or theirs is None else (mine, theirs)


def _clock(own: DeviceWindow, peers: Sequence[DeviceWindow], node: Sequence[DeviceWindow]) -> list[str]:
    pair = _pair(own, peers, lambda window: mean_of(window, "sm_clock_hz"))
    if pair is None or pair[0] >= (1 - SLOWER_CLOCK) * pair[1]:
        return []
    beside = _median(node, lambda window: mean_of(window, "sm_clock_hz"))
    also = (
        " (also low on other GPUs of the node)" if beside is not None and beside < (1 - SLOWER_CLOCK) * pair[1] else ""
    )
    return [f"SM clock {pair[0] / 1e9:.2f} GHz against {pair[1] / 1e9:.2f}{also}"]


def _clock_explains(own: DeviceWindow, peers: Sequence[DeviceWindow], slowdown: float) -> bool:
    """Whether the lower clock can cause at least `MIN_EXPLAINED` of the slowdown: clocks of equal GPUs differ."""
    pair = _pair(own, peers, lambda window: mean_of(window, "sm_clock_hz"))
    return pair is not None and pair[0] > 0 and pair[1] / pair[0] - 1 >= MIN_EXPLAINED * slowdown


def _reasons(own: DeviceWindow, peers: Sequence[DeviceWindow]) -> list[str]:
    found = []
    for reason in own.throttled_s:
        pair = _pair(own, peers, lambda window, reason=reason: _throttled(window, reason))  # type: ignore[misc]
        if reason != "any" and pair is not None and pair[0] >= pair[1] + OFTENER_THROTTLED:
            found.append(REASONS.get(reason, reason.replace("_", " ")))
    return found


def _limit(own: DeviceWindow, peers: Sequence[DeviceWindow]) -> list[str]:
    pair = _pair(own, peers, lambda window: mean_of(window, "power_limit_w"))
    if pair is None or pair[0] >= (1 - LOWER_LIMIT) * pair[1]:
        return []
    return [f"power limit {pair[0]:.0f} W against {pair[1]:.0f}"]


def _temperature(own: DeviceWindow, peers: Sequence[DeviceWindow], node: Sequence[DeviceWindow]) -> list[str]:
    pair = _pair(own, peers, lambda window: mean_of(window, "temperature_c"))
    if pair is None or pair[0] < pair[1] + HOTTER_C:
        return []
    beside = _median(node, lambda window: mean_of(window, "temperature_c"))
    also = " (also high on other GPUs of the node)" if beside is not None and beside >= pair[1] + HOTTER_C else ""
    return [f"{pair[0]:.0f} degC against {pair[1]:.0f}{also}"]


def _host(own: DeviceWindow, peers: Sequence[DeviceWindow]) -> list[str]:
    pair = _pair(own, peers, _utilization)
    if pair is None or pair[0] > pair[1] - IDLER:
        return []
    return [f"slow host: the GPU is busy {100 * pair[0]:.0f} % of the time, GPUs of peers {100 * pair[1]:.0f} %"]
