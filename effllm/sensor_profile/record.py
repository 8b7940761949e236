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
    """The response of a reading to the load: each value is the mean of a window that ends before the value is shown."""

    window_s: float
    window_error_s: float  # 95 % half-width, as of `middle_error_s`
    ends_s: float  # time from the end of the window until the value is shown
    middle_s: float  # time from the middle of the window until the value is shown
    middle_error_s: float
    fit: float  # share of the reading's variance that the load explains: r^2
    idle_w: float  # power of the idle GPU, by the fitted model
    loaded_w: float


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


class BoardFacts(Struct, frozen=True):
    """The properties and settings of the GPU."""

    name: str
    uuid: str  # the first characters of the UUID's hash
    driver: str
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
    power_is_held: bool | None = None  # whether power is the mean of the counter's last tick
    calls: list[DriverCall] = []
    fields: list[FieldAnswer] = []
    read_every_s: float = 0.0
    edges: int = 0
    unmeasured: list[str] = []
    warnings: list[str] = []
