"""Power traces of simulated GPUs, and their sensors: a set for tuning, and a held-out set for results.

A trace is one power wave on one or more GPUs.  The GPUs' sensors tick at different times, as on a real node.
The held-out set shares no period, level, phase or seed with the tuning set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.nvml_library import Curve, Gpu, bursts, sine, square, steps

TUNING, HELD_OUT = "tuning", "held-out"
REFERENCE = "square"

#: NVML's numbers of architectures.
VOLTA, ADA, HOPPER = 5, 8, 9


@dataclass(frozen=True)
class Group:
    """GPUs that draw the same power at the same time."""

    name: str
    gpus: tuple[Gpu, ...]
    gain: float = 1.0

    @property
    def is_planted(self) -> bool:
        """Whether the sensors have a planted gain error; the totals over all traces do not include such groups."""
        return self.gain != 1.0


def hosts(chosen: str) -> list[list[Group]]:
    """Return the groups of each host of a set; a host has eight GPUs at most, in the order of its groups.

    Each group of the held-out set has its own random wave.  If a sensor measures part of each tick, the error of its
    counter depends on the ratio of the wave's period to the tick: with one period, this ratio would decide the result.
    """
    chance = random.Random({TUNING: 20261121, HELD_OUT: 1618033}[chosen])
    made = []
    for rows in _HOSTS:
        groups = []
        for name, wave, count, sensor in rows:
            power = _TUNING_WAVES[wave] if chosen == TUNING else drawn(wave, chance)
            gpus = [sensor(Gpu("", power=power), chance) for _ in range(count)]
            groups.append(Group(name, tuple(gpus), gpus[0].gain))
        made.append(_placed(groups, len(made)))
    return made


_TUNING_WAVES: dict[str, Curve] = {
    "square": square(100.0, 500.0, 2.0),
    "fast": square(120.0, 420.0, 0.37, 0.6),
    "sine": sine(150.0, 450.0, 3.1),
    "bursts": bursts(90.0, 650.0, 1.3, 0.12, 7),
    "steps": steps(120.0, 560.0, 0.43, 11),
}


def drawn(wave: str, chance: random.Random) -> Curve:
    """Return a wave of this kind with random levels, period, share and seed."""
    low_w, high_w = round(chance.uniform(70.0, 200.0)), round(chance.uniform(420.0, 690.0))
    share, seed = round(chance.uniform(0.35, 0.65), 2), chance.randrange(10_000)
    period_s = {name: round(chance.uniform(*between), 3) for name, between in _PERIODS_S.items()}[wave]
    if wave == "sine":
        return sine(low_w, high_w, period_s)
    if wave == "bursts":
        return bursts(low_w, high_w, period_s, share / 3, seed)
    if wave == "steps":
        return steps(low_w, high_w, period_s, seed)
    return square(low_w, high_w, period_s, share)


#: Ranges of random periods; the periods of the tuning set are within these ranges.
_PERIODS_S = {
    "square": (1.2, 2.6),
    "fast": (0.22, 0.45),
    "sine": (1.5, 4.0),
    "bursts": (0.7, 1.6),
    "steps": (0.35, 0.8),
}

_Sensor = Callable[[Gpu, random.Random], Gpu]


def _ticking(gpu: Gpu, chance: random.Random, tick_s: float) -> Gpu:
    """Return a GPU whose counter and power change only at ticks."""
    return replace(gpu, tick_s=tick_s, tick_phase_s=round(chance.uniform(0.0, tick_s), 6), power_mode="held")


# The names of the boards fit the simulated sensors: the real boards have such sensors (arXiv 2312.02741, raw table).


def _whole_100(gpu: Gpu, chance: random.Random) -> Gpu:
    return replace(_ticking(gpu, chance, 0.1), name="NVIDIA L40S", architecture=ADA, power_usage="average")


def _half_20(gpu: Gpu, chance: random.Random) -> Gpu:
    return replace(_ticking(gpu, chance, 0.02), name="Tesla V100-SXM2-32GB", architecture=VOLTA, duty_s=0.01)


def _quarter_100(gpu: Gpu, chance: random.Random) -> Gpu:
    ticking = _ticking(gpu, chance, 0.1)
    return replace(ticking, name="NVIDIA H100 80GB HBM3", architecture=HOPPER, duty_s=0.025, power_usage="average")


def _off(sensor: _Sensor) -> _Sensor:
    return lambda gpu, chance: replace(sensor(gpu, chance), gain=1.05)


def _placed(groups: Sequence[Group], host: int) -> list[Group]:
    """Give each GPU its own UUID and bus address, in the order of NVML's indices."""
    placed, index = [], 0
    for group in groups:
        gpus = []
        for gpu in group.gpus:
            gpus.append(replace(gpu, uuid=f"GPU-{host:04x}{index:04x}", bus=f"00000000:{index + 1:02X}:00.0"))
            index += 1
        placed.append(replace(group, gpus=tuple(gpus)))
    return placed


#: Name, wave, number of GPUs and sensor of each group, by host.
_HOSTS = (
    ((REFERENCE, "square", 8, _whole_100),),
    (
        ("fast square", "fast", 2, _whole_100),
        ("sine", "sine", 2, _whole_100),
        ("bursts", "bursts", 2, _whole_100),
        ("steps", "steps", 1, _whole_100),
    ),
    (
        ("square, 20 ms", "square", 1, _half_20),
        ("fast square, 20 ms", "fast", 1, _half_20),
        ("square, 25 %", "square", 2, _quarter_100),
        ("sine, 25 %", "sine", 1, _quarter_100),
        ("steps, 25 %", "steps", 1, _quarter_100),
    ),
    (
        ("square, +5 %", "square", 1, _off(_whole_100)),
        ("sine, +5 %", "sine", 1, _off(_whole_100)),
        ("square, 25 %, +5 %", "square", 1, _off(_quarter_100)),
    ),
)
