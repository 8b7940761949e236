"""The profile of one GPU's sensors: plain values that can be published.

The profile has no host, user, serial number or path, and only a short hash of the UUID.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from effllm.records.rank import Sensor


class LoadEdge(NamedTuple):
    """A time at which load was switched on or off."""

    time_ns: int  # time of the monotonic clock
    is_on: bool


class Rhythm(Struct, frozen=True):
    """The period of the changes of a reading."""

    period_s: float  # 0 if the reading is continuous
    error_s: float  # half-width, 95 %
    jitter_s: float  # standard deviation of the times from a regular grid
    changes: int


class Response(Struct, frozen=True):
    """The response of a reading to the load: each value is a mean over a window that ends before the value is shown."""

    window_s: float
    window_error_s: float  # half-widths, 95 %
    ends_s: float  # end of the window, before the value is shown
    middle_s: float  # middle of the window, before the value is shown
    middle_error_s: float
    fit: float  # explained share of the reading's variance: r^2
    idle_w: float  # power of the idle GPU by the fit
    loaded_w: float


class Ratio(Struct, frozen=True):
    """The ratio of the counter's energy to integrated power."""

    value: float
    low: float  # 95 %
    high: float
    seconds: float


class DriverCall(Struct, frozen=True):
    """The time of one call of the driver."""

    name: str
    median_s: float
    worst_s: float
    calls: int


class FieldAnswer(Struct, frozen=True):
    """A field or function of the driver, for one scope."""

    name: str
    scope: str
    answer: str  # "ok", or the error


class State(Struct, frozen=True):
    """The state of the GPU over one time span."""

    seconds: float
    power_w: float | None = None
    counter_w: float | None = None
    utilization: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    temperature_c: float | None = None
    throttled: dict[str, float] = {}  # share of the reads by reason


class BoardFacts(Struct, frozen=True):
    """The properties and settings of the GPU."""

    name: str
    uuid: str  # the first characters of the UUID's hash
    driver: str
    traits: dict[str, str] = {}
    power_limit_w: float | None = None


class SensorProfile(Struct, frozen=True):
    """All results of a profile."""

    effllm: str
    date: str
    seconds: float
    board: BoardFacts
    sensor: Sensor  # the sensor for runs on this model and driver
    measured_lag: bool
    load: str = ""  # name of the load; empty without a load
    counter: Rhythm | None = None
    counter_response: Response | None = None
    power: Rhythm | None = None
    power_response: Response | None = None
    average: Rhythm | None = None
    average_response: Response | None = None
    usage: Rhythm | None = None  # rhythm of nvmlDeviceGetPowerUsage, whose meaning differs between boards
    usage_response: Response | None = None
    power_is_held: bool | None = None  # whether power changes at the counter's ticks and is the last tick's mean
    ratios: dict[str, Ratio] = {}  # ratio of counter to integrated power: idle, loaded, switched
    idle: State | None = None
    loaded: State | None = None
    calls: list[DriverCall] = []
    fields: list[FieldAnswer] = []
    read_every_s: float = 0.0
    edges: int = 0
    unmeasured: list[str] = []
    warnings: list[str] = []
