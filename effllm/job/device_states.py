"""The newest state of each device of a job: its energy so far, and its readings in the newest window. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence

from effllm.job.aggregator import Aggregator
from effllm.job.health.straggler_reasons import mean_gauge
from effllm.job.merged import BUSY, BUSY_S, MEMORY, MEMORY_S, Merged
from effllm.job.roster import Roster
from effllm.records.device_state import CPU_KIND, GPU_KIND, MODULE_KIND, NODE_KIND, DeviceState
from effllm.records.energy import COVERED_S, JOULES, MIN_COVERED_S
from effllm.records.rank import CPU, MODULE, NODE_PSU, Device, RankReport

_KINDS = {NODE_PSU: NODE_KIND, CPU: CPU_KIND, MODULE: MODULE_KIND}  # by the scope of the power of a common energy key


def device_states(aggregator: Aggregator, rows: Sequence[RankReport]) -> tuple[DeviceState, ...]:
    """Return the state of each device, and of each common energy key.

    The joules of all states add up to the sum of ``by_device`` in summary.json. ``rows`` are the reports of the newest
    window.
    """
    ledger, roster, merged = aggregator.ledger, aggregator.roster, aggregator.closed_windows.last_merged
    spent_j = ledger.devices.joules_by_key()
    temperatures = {device.device: mean_gauge(device, "temperature_c") for row in rows for device in row.devices}
    owners = {device.energy_key: device for device in roster.devices.values() if device.energy_key}
    states = [
        _state(key, device, _host_of(roster, key), spent_j.pop(key, None), merged, temperatures.get(key))
        for key, device in sorted(roster.devices.items())
    ]
    # The keys that are left are common energy keys, and devices of earlier attempts.
    for key, joules in sorted(spent_j.items()):
        owner = owners.get(key)
        host = _host_of(roster, owner.key) if owner is not None else ""
        states.append(DeviceState(key, _kind_of_key(key, owner, ledger.scope), host, joules=joules))
    return tuple(states)


def _host_of(roster: Roster, key: str) -> str:
    """Return the host of the ranks that use a device; empty if it is unknown."""
    ranks = roster.members.get(key, ())
    return min((hello.host for rank in ranks if (hello := roster.hellos.get(rank)) is not None), default="")


def _state(
    key: str, device: Device, host: str, joules: float | None, merged: Merged | None, celsius: float | None
) -> DeviceState:
    readings = _mean_readings(device, merged) if merged is not None else {}
    return DeviceState(
        key,
        GPU_KIND if device.is_gpu else NODE_KIND if device.power_scope == NODE_PSU else CPU_KIND,
        host,
        device.name,
        device.driver,
        joules,
        memory_total_bytes=device.memory_total_bytes,
        temperature_c=celsius,
        **readings,
    )


def _mean_readings(device: Device, merged: Merged) -> dict[str, float | None]:
    row = merged.row_by_key.get(device.key)
    if row is None:
        return {}
    energy, levels = merged.wall.energy[row], merged.wall.levels[row]
    return {
        # With a common energy key, the power is of several devices.
        "power_w": None if device.energy_key else _mean(energy[JOULES], energy[COVERED_S]),
        "memory_bytes": _mean(levels[MEMORY], levels[MEMORY_S]),
        "utilization": _mean(levels[BUSY], levels[BUSY_S]),
    }


def _mean(value_seconds: float, covered_s: float) -> float | None:
    return float(value_seconds / covered_s) if covered_s > MIN_COVERED_S and not math.isnan(value_seconds) else None


def _kind_of_key(key: str, owner: Device | None, scope: str) -> str:
    """Return the kind of an energy key: from a device with this key, else from the scope of the job's energy."""
    if owner is not None:
        return _KINDS.get(owner.power_scope or "", GPU_KIND)
    if scope == NODE_PSU:
        return NODE_KIND
    return CPU_KIND if key.startswith("cpu:") else GPU_KIND
