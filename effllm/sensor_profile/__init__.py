"""Measures the sensors of one GPU that has no other work: idle, then under a known load.

Reads are as frequent as the driver allows and would disturb a job, so no other program should use the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from effllm.devices import Reader
from effllm.energy.calibration import Calibration
from effllm.sensor_profile.finding import MEASURED, PROFILED, SensorEvidence
from effllm.sensor_profile.load import LoadUnavailable, TorchLoad, pattern
from effllm.sensor_profile.nvml_facts import Facts
from effllm.sensor_profile.record import SensorProfile
from effllm.sensor_profile.watching import Timer, call_costs, watch

IDLE_SHARE, MIN_IDLE_S = 0.15, 2.5  # the idle GPU's share of the time of all measurements

Progress = Callable[[str, float], None]


def profile(
    reader: Reader,
    open_load: Callable[[], TorchLoad],
    seconds: float,
    *,
    facts: Facts | None = None,
    progress: Progress = lambda _stage, _share: None,
    clock: Timer = time,
) -> SensorProfile:
    """Measure the behaviour of the sensors of a GPU.

    Args:
        reader: the open GPU.
        open_load: prepares the load; called only after the idle GPU was measured, because a CUDA context raises power.
        seconds: total duration of all measurements.
        facts: NVML's own data, for an NVIDIA GPU.
        progress: called with the name of a stage and with the part of the stage that is done, 0..1.
        clock: the time.
    """
    others = facts.processes() if facts else None
    beside = facts.powers() if facts else {}
    idle_s = max(IDLE_SHARE * seconds, MIN_IDLE_S)
    idle = watch(reader, clock, lambda share: progress("idle", share), idle_s, beside)
    progress("calls", 0.0)
    calls = call_costs(reader, facts, clock)
    found = SensorEvidence(reader.device, idle, others)
    loader: TorchLoad | None = None
    try:
        progress("load", 0.0)
        loader = open_load()
        stretches = pattern((1 - IDLE_SHARE) * seconds, found.tick_s or 0.1)
        loader.start(stretches)
        loaded = watch(reader, clock, lambda share: progress("load", share), sum(stretches), beside, loader)
        progress("estimates", 0.0)
        found.under_load(loaded, loader.name)
    except LoadUnavailable as error:
        found.unmeasured.append(f"lag, windows and the loaded GPU: {error}")
    finally:
        if loader is not None:
            loader.close()
    progress("estimates", 1.0)
    return found.profile(seconds, calls, facts)


def to_calibration(found: SensorProfile) -> Calibration | None:
    if found.sensor.source not in (PROFILED, MEASURED):
        return None
    return Calibration(found.board.name, found.board.driver, found.date, found.sensor, found.measured_lag)
