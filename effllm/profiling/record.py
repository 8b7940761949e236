"""What a profile finds out about one GPU: plain values that may stand in a public issue.

No host, user, serial number or path is in it, and of the UUID a short hash alone.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from effllm.records.rank import Sensor


class LoadEdge(NamedTuple):
    """A moment at which load was switched on or off."""

    time_ns: int  # of the monotonic clock
    is_on: bool


class Rhythm(Struct, frozen=True):
    """How often a reading changes."""

    period_s: float  # 0: all the time
    error_s: float  # half-width, 95 %
    jitter_s: float  # standard deviation of the moments from a regular grid
    changes: int


class Response(Struct, frozen=True):
    """How a reading follows the load: each value is a mean over a window that ends some time before it is shown."""

    window_s: float
    window_error_s: float  # half-widths, 95 %
    ends_s: float  # so long before the value is shown
    middle_s: float  # the window's, as long before
    middle_error_s: float
    fit: float  # share of the reading's variance that this explains: r^2
    idle_w: float  # of the fit
    loaded_w: float


class Ratio(Struct, frozen=True):
    """What the counter counted over what power integrates to."""

    value: float
    low: float  # 95 %
    high: float
    seconds: float


class DriverCall(Struct, frozen=True):
    """What one call of the driver takes."""

    name: str
    median_s: float
    worst_s: float
    calls: int


class FieldAnswer(Struct, frozen=True):
    """A field or function of the driver, asked for one scope."""

    name: str
    scope: str
    answer: str  # "ok", or why not


class State(Struct, frozen=True):
    """The GPU over one stretch."""

    seconds: float
    power_w: float | None = None
    counter_w: float | None = None
    utilization: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    temperature_c: float | None = None
    throttled: dict[str, float] = {}  # share of the reads by reason


class BoardFacts(Struct, frozen=True):
    """What the GPU is and how it is set."""

    name: str
    uuid: str  # the first characters of a hash of it
    driver: str
    traits: dict[str, str] = {}
    power_limit_w: float | None = None


class SensorProfile(Struct, frozen=True):
    """Everything that was found."""

    effllm: str
    date: str
    seconds: float
    board: BoardFacts
    sensor: Sensor  # what runs on this model and driver will use
    measured_lag: bool
    load: str = ""  # what loaded it; empty where nothing did
    counter: Rhythm | None = None
    counter_response: Response | None = None
    power: Rhythm | None = None
    power_response: Response | None = None
    average: Rhythm | None = None
    average_response: Response | None = None
    usage: Rhythm | None = None  # what nvmlDeviceGetPowerUsage returns, of which boards differ in the meaning
    usage_response: Response | None = None
    power_is_held: bool | None = None  # it changes at the counter's ticks, and is the power of the tick before
    ratios: dict[str, Ratio] = {}  # counter over integrated power: idle, loaded, switched
    idle: State | None = None
    loaded: State | None = None
    calls: list[DriverCall] = []
    fields: list[FieldAnswer] = []
    read_every_s: float = 0.0
    edges: int = 0
    unmeasured: list[str] = []
    warnings: list[str] = []
