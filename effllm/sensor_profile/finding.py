"""Reads a GPU as often as the driver allows, and finds the behaviour of its sensors when idle and under load."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from effllm import __version__
from effllm.devices import Reader
from effllm.energy import calibration
from effllm.energy.calibration import SensorMeasurement
from effllm.energy.readings import NS
from effllm.energy.tick_clock import is_held
from effllm.records.rank import AVERAGE, COUNTER, Device, Sample, Sensor
from effllm.sensor_profile import estimates
from effllm.sensor_profile.load import TorchLoad
from effllm.sensor_profile.nvml_facts import Facts, timed_call
from effllm.sensor_profile.record import BoardFacts, DriverCall, LoadEdge, Response, Rhythm, SensorProfile

#: The smallest error of a lag, because power itself rises some time after a kernel starts.
MIN_LAG_ERROR_S = 0.005
#: The smallest relative error of a tick, because a profile is used for all boards of a model, and their clocks differ.
MIN_TICK_ERROR = 5e-4
#: A measured window that is longer than this share of a tick counts as the whole tick.
WHOLE_TICK = 0.97
SMOOTHED_TICKS = 1.3  # the values of a counter whose window is more ticks long are smoothed

#: The source of a sensor's values: measured under load, or measured only on the idle GPU.
PROFILED, MEASURED = "profiled here", "measured here"

#: The analysed readings by their names in `SensorProfile`: the name of the series, and the words for a user.
_SERIES = {
    "counter": ("energy_j", "energy counter"),
    "power": ("power_w", "power reading"),
    "average": ("power_average_w", "averaged power"),
}
_ENERGY_SERIES = {COUNTER: "counter", AVERAGE: "average"}  # of a method of energy; all others are of the power reading
READS_APART_S = 0.002
FULL_READS_APART_S = 0.5


class _SeriesAnalysis(NamedTuple):
    """The changes of a series of readings, and its values that follow the load."""

    rhythm: Rhythm | None  # the period of the changes
    ticks: list[estimates.Tick]  # the changes
    load_values: list[tuple[float, float]]  # compared with the load; of a counter, the power of each increase


class SensorEvidence:
    """The results of the measurements so far; ``num_processes``: other processes that compute on the GPU.

    Readings are named as in `_SERIES`.
    """

    def __init__(self, device: Device, idle: Record, num_processes: int | None) -> None:
        self._device, self._idle = device, idle
        self.unmeasured: list[str] = []
        self._warnings: list[str] = []
        self._load_name, self._num_edges = "", 0
        self._responses: dict[str, Response] = {}  # of the readings that follow the load
        self._was_held_under_load: bool | None = None  # see `_is_held_by`
        self._analyses = _analysed_record(idle)  # of each reading the analysis with the most changes
        self._call_s = statistics.median(idle.calls_s) if idle.calls_s else 0.0
        busy = max((sample.utilization or 0.0 for sample in idle.full), default=0.0)
        if num_processes:
            self._warnings.append(f"{num_processes} other processes compute on this GPU: stop them and profile again")
        elif busy > 0:
            self._warnings.append(
                f"the GPU was {100 * busy:.0f} % busy before its load began: does another process use the GPU?"
            )

    @property
    def tick_s(self) -> float:
        """The tick of the counter, else the tick of the power reading; 0 if both are unknown."""
        rhythms = (self._analyses[name].rhythm for name in ("counter", "power"))
        return next((rhythm.period_s for rhythm in rhythms if rhythm is not None), 0.0)

    def add_load_record(self, record: Record, load_name: str) -> None:
        """Add what was read under the load: the changes of the readings, and their responses to the load."""
        self._load_name, self._num_edges = load_name, len(record.edges)
        load = estimates.Load(record.edges, record.origin_ns)
        analyses = _analysed_record(record)
        for name, analysis in analyses.items():
            before = self._analyses[name]
            if before.rhythm is None or (analysis.rhythm and analysis.rhythm.changes >= before.rhythm.changes):
                self._analyses[name] = analysis
        from_s = load.times_s[0] + estimates.MAX_DELAY_S + estimates.MAX_WINDOW_S if record.edges else 0.0
        for name, analysis in analyses.items():
            response = estimates.fit_response(load, [value for value in analysis.load_values if value[0] >= from_s])
            if response is not None:
                self._responses[name] = response
            elif analysis.load_values:
                self.unmeasured.append(
                    f"lag and window of the {_SERIES[name][1]}: this reading does not follow the load"
                )
        self._was_held_under_load = self._is_held_by(analyses["counter"], analyses["power"])

    def _is_held_by(self, counter: _SeriesAnalysis, power: _SeriesAnalysis) -> bool | None:
        """Return whether power changes only at the counter's ticks, where each reading is the mean of the last tick."""
        if counter.rhythm is None or not counter.rhythm.period_s or not power.load_values:
            return None
        tick_s = counter.rhythm.period_s
        within_s = 0.1 * tick_s + 2 * READS_APART_S
        if power.rhythm is None or not estimates.changes_with(power.ticks, counter.ticks, within_s):
            return False
        of_counter, of_power = self._responses.get("counter"), self._responses.get("power")
        if of_counter is None or of_power is None:
            return None
        return abs(of_counter.middle_s - of_power.middle_s) < tick_s / 4

    @property
    def _lag_s(self) -> float | None:
        """The counter's lag: a tick shows the energy up to a time `_lag_s` before the tick; ``None`` if unknown."""
        response, rhythm = self._responses.get("counter"), self._analyses["counter"].rhythm
        return None if response is None or rhythm is None else response.middle_s - rhythm.period_s / 2

    def profile(self, seconds: float, calls: list[DriverCall], facts: Facts | None) -> SensorProfile:
        response, rhythm = self._responses.get("counter"), self._analyses["counter"].rhythm
        if response and rhythm and _is_smoothed(response, rhythm):
            self._warnings.append(f"the counter is smoothed over {1e3 * response.window_s:.0f} ms, more than its tick")
        device, sensor = self._device, self._sensor()
        fields: dict[str, Any] = {name: analysis.rhythm for name, analysis in self._analyses.items()}
        fields |= {f"{name}_response": response for name, response in self._responses.items()}
        return SensorProfile(
            effllm=__version__,
            date=time.strftime("%Y-%m-%d"),
            seconds=seconds,
            board=BoardFacts(
                name=device.name,
                uuid=hashlib.sha256(device.key.encode()).hexdigest()[:8],
                driver=device.driver,
                power_limit_w=device.power_limit_w,
            ),
            sensor=sensor,
            measured_lag=sensor.source == PROFILED,
            load=self._load_name,
            **fields,
            power_is_held=self._is_power_held(),
            calls=calls,
            fields=facts.field_answers() if facts else [],
            read_every_s=self._idle.mean_apart_s,
            edges=self._num_edges,
            unmeasured=self.unmeasured,
            warnings=self._warnings,
        )

    def _is_power_held(self) -> bool | None:
        return is_held(self._idle.samples) if self._was_held_under_load is None else self._was_held_under_load

    def _sensor(self) -> Sensor:
        """Return the sensor for runs on this model and driver; unmeasured values are assumed."""
        # The period of the counter or power reading from which energy is derived.
        rhythm = self._analyses[_ENERGY_SERIES.get(self._device.energy_method or "", "power")].rhythm
        tick = None
        if rhythm is not None:
            tick = (rhythm.period_s, max(rhythm.error_s, MIN_TICK_ERROR * rhythm.period_s))
        measured = SensorMeasurement(self._call_s, tick, self._is_power_held())
        sensor = calibration.with_measurement(calibration.assumed_sensor(self._device), measured)
        average = self._responses.get("average")
        if average is not None:
            sensor = replace(sensor, average_s=average.window_s)
        response, lag_s = self._responses.get("counter"), self._lag_s
        if self._device.energy_method != COUNTER:  # `lag_s` is the lag of the energy counter only
            return replace(sensor, source=PROFILED) if self._responses and tick is not None else sensor
        if response is None or rhythm is None or lag_s is None:
            return sensor
        error_s = response.middle_error_s
        if _is_smoothed(response, rhythm):
            error_s += (response.window_s - rhythm.period_s) / 2  # the lag does not correct the counter's smoothing
        lag_error_s = max(error_s, MIN_LAG_ERROR_S)
        return replace(sensor, lag_s=lag_s, lag_error_s=lag_error_s, duty=_duty(response, rhythm), source=PROFILED)


def _analysed_record(record: Record) -> dict[str, _SeriesAnalysis]:
    return {name: _analysed_series(record.series(field), name == "counter") for name, (field, _) in _SERIES.items()}


def _analysed_series(series: list[tuple[float, float]], is_counter: bool) -> _SeriesAnalysis:
    rhythm_and_ticks = estimates.ticks_of(series)
    if rhythm_and_ticks is None:
        return _SeriesAnalysis(None, [], [] if is_counter else series)
    rhythm, ticks = rhythm_and_ticks
    if is_counter:
        return _SeriesAnalysis(rhythm, ticks, estimates.powers_of_increases(ticks, rhythm))
    return _SeriesAnalysis(rhythm, ticks, [(tick.at_s, tick.value) for tick in ticks] if rhythm.period_s else series)


def _is_smoothed(response: Response, rhythm: Rhythm) -> bool:
    return rhythm.period_s > 0 and response.window_s > SMOOTHED_TICKS * rhythm.period_s


def _duty(response: Response, rhythm: Rhythm) -> float:
    """Return the share of a tick that the counter measures: 1 if its window may be the whole tick."""
    if not rhythm.period_s or response.window_s + response.window_error_s >= WHOLE_TICK * rhythm.period_s:
        return 1.0
    return response.window_s / rhythm.period_s


class Timer(Protocol):
    """The functions of the module ``time`` that are used here."""

    def monotonic_ns(self) -> int: ...

    def sleep(self, seconds: float, /) -> None: ...


class Record(NamedTuple):
    """The samples of one time span."""

    samples: list[Sample]
    full: list[Sample]  # samples with all quantities
    calls_s: list[float]  # durations of the readings of energy and power only
    edges: Sequence[LoadEdge] = ()

    @property
    def origin_ns(self) -> int:
        """The time of the first sample, from which the record's seconds are counted."""
        return self.samples[0].time_ns

    @property
    def end_s(self) -> float:
        return (self.samples[-1].time_ns - self.origin_ns) * NS if self.samples else 0.0

    @property
    def mean_apart_s(self) -> float:
        return self.end_s / max(len(self.samples) - 1, 1)

    def series(self, name: str) -> list[tuple[float, float]]:
        values = ((sample.time_ns, getattr(sample, name, None)) for sample in self.samples)
        return [((time_ns - self.origin_ns) * NS, value) for time_ns, value in values if value is not None]


def record_readings(
    reader: Reader,
    clock: Timer,
    progress: Callable[[float], None],
    seconds: float,
    load: TorchLoad | None = None,
) -> Record:
    """Read for a duration, or with a load until it ends; then the record has the edges of the load."""
    read_energy = getattr(reader, "read_energy", reader.read)
    began_ns = next_full_ns = next_progress_ns = clock.monotonic_ns()
    record = Record([], [], [])
    while True:
        now_ns = clock.monotonic_ns()
        if now_ns >= next_progress_ns:
            progress(min((now_ns - began_ns) * NS / seconds, 1.0))
            next_progress_ns = now_ns + round(0.1 / NS)
            if load is not None and (edges := load.take_edges()) is not None:
                return record._replace(edges=edges)
        if load is None and now_ns >= began_ns + seconds / NS:
            return record
        is_full = now_ns >= next_full_ns
        sample, _ = reader.read() if is_full else read_energy()
        if is_full:
            record.full.append(sample)
            next_full_ns = now_ns + round(FULL_READS_APART_S / NS)
        else:
            record.calls_s.append((clock.monotonic_ns() - now_ns) * NS)
        if not record.samples or sample.time_ns > record.samples[-1].time_ns:
            record.samples.append(sample)
        clock.sleep(READS_APART_S)


def call_durations(reader: Reader, facts: Facts | None, clock: Timer) -> list[DriverCall]:
    named_calls = [("a sample of the agent", reader.read)]
    if hasattr(reader, "read_energy"):
        named_calls.append(("a read of the agent at the edge of a window", reader.read_energy))
    own = [call for name, ask in named_calls if (call := timed_call(name, ask, clock.sleep)) is not None]
    return own + (facts.call_durations(clock.sleep) if facts else [])
