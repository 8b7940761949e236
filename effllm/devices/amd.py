"""An AMD GPU, read through AMD SMI and identified by its unique id, never by an index.

This file is not tested on an AMD GPU.  Names, units and shapes are taken from the sources of the Python package amdsmi
(ROCm 6.2 to 7.0), of its C library, and of the amdgpu driver; comments name open points.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from effllm.devices import DeviceUnavailable, Site
from effllm.devices import _amd_readings as calls
from effllm.devices._amd_identity import Processor, find_processor, first_die, is_second_die, list_processors, whole_gpu
from effllm.records.rank import AVERAGE, COUNTER, GAUGES, GPU, INSTANT, MODULE, Device, Sample, Sensor

#: Duration and period of the comparison when a device is opened.
CHECK_S = 0.5
CHECK_EVERY_S = 0.02
#: Largest relative difference between a good counter and integrated power.  Power is a mean over
#: 100 ms: its integral is up to 13 % too low if power rises fivefold in half a second.  Faulty counters were a hundred
#: times too slow, did not change, or decreased.
COUNTER_TOLERANCE = 0.25

# The driver reads the sensors at most once a millisecond (ROCm/legacy-rocm-build#1649).  AMD does not document
# the time over which power is averaged; ROCm/ROC-smi#89 says "around 100 ms".
_SENSOR = Sensor(lag_error_s=0.1, average_s=0.1)


class _EnergySource(NamedTuple):
    """The source of a device's energy; the fields have the meaning of the fields of `Device`."""

    method: str | None
    note: str = ""
    missing: str = ""  # reason why the device has no source of energy
    key: str = ""


class AmdReader:
    """An open GPU; every read of a lost GPU fails."""

    def __init__(
        self,
        smi: Any,
        processor: Processor,
        processors: Sequence[Processor],
        host: str,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._smi, self._errors = smi, calls.errors_of(smi)
        self._handle, self._host = processor.handle, host
        self._clock, self._sleep = clock, sleep
        self._fields_by_group = self._supported_fields(processor)
        residencies, status = calls.read_throttling(self._smi, self._handle)
        self._has_throttling = bool(residencies) or status is not None
        self._residencies: dict[str, float] | None = None  # at the last reading: limit -> total time of activity
        self.device = self._make_device(processor, self._choose_source(processor, processors))
        self._is_open = True

    def read(self) -> tuple[Sample, dict[str, str]]:
        time_ns, values, failures = self._read_groups(calls.GROUPS)
        sample = Sample(
            time_ns=time_ns,
            memory_bytes=values.get("memory_bytes"),
            utilization=values.get("utilization"),
            power_w=values.get("power_w"),
            energy_j=values.get("energy_j"),
            power_average_w=values.get("power_average_w"),
            gauges={field: value for field, value in values.items() if field in GAUGES},
            throttled_by=self._throttled_by(failures) if self._has_throttling else None,
        )
        return sample, failures

    def read_energy(self) -> tuple[Sample, dict[str, str]]:
        """Return only energy and power: two calls instead of nine."""
        time_ns, values, failures = self._read_groups((calls.read_energy, calls.read_power))
        power_w, average_w, energy_j = (values.get(field) for field in ("power_w", "power_average_w", "energy_j"))
        sample = Sample(time_ns, power_w=power_w, energy_j=energy_j, power_average_w=average_w, energy_only=True)
        return sample, failures

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(*self._errors):
                self._smi.amdsmi_shut_down()

    def _supported_fields(self, processor: Processor) -> dict[calls.Group, tuple[str, ...]]:
        """Return the supported fields by group, including fields whose read fails only at the moment."""
        supported = {}
        for group, fields in calls.GROUPS.items():
            try:
                answer = group(self._smi, self._handle)
            except self._errors as error:
                is_lacking = getattr(error, "err_code", None) in calls.LACKING or isinstance(error, AttributeError)
                supported[group] = () if is_lacking else fields
            else:
                supported[group] = tuple(field for field in fields if field in answer)
        if "MI3" not in processor.model:
            # On MI300 the field is the used share of the DRAM bandwidth (DramBandwidthUtilization); on older GPUs it is
            # the busy share of the memory clock domain.
            activities = supported[calls.read_activity]
            supported[calls.read_activity] = tuple(field for field in activities if field != "dram_activity_ratio")
        return supported

    def _has_field(self, *fields: str) -> bool:
        return any(field in supported for supported in self._fields_by_group.values() for field in fields)

    def _choose_source(self, processor: Processor, processors: Sequence[Processor]) -> _EnergySource:
        """Choose the source of energy; calls of sources that are not used are not made again."""
        if is_second_die(self._smi, processor):
            self._fields_by_group[calls.read_energy] = self._fields_by_group[calls.read_power] = ()
            first = first_die(self._smi, processor, processors)
            first_text = f"the first die, {first.key(self._host)}," if first else "the first die, not visible here,"
            missing = f"energy: this is the second die of its card; {first_text} reports the energy of both dies"
            return _EnergySource(None, missing=missing, key=first.key(self._host) if first else "")
        source = self._counter_or_power()
        if processor.is_one_of_two_dies and source.method:
            note = "; ".join(part for part in ("energy of both dies of the card", source.note) if part)
            return source._replace(note=note, key=processor.key(self._host))
        return source

    def _counter_or_power(self) -> _EnergySource:
        has_counter = bool(self._fields_by_group[calls.read_energy])
        judged = (
            judge_counter(self._read_for_comparison()) if has_counter else CounterJudgement(False, "no counter found")
        )
        if judged.is_good:
            note = f"the energy counter is not checked: {judged.reason}" if judged.reason else ""
            return _EnergySource(COUNTER, note)
        self._fields_by_group[calls.read_energy] = ()
        method = INSTANT if self._has_field("power_w") else AVERAGE if self._has_field("power_average_w") else None
        if method is None:
            missing = f"energy: AMD SMI gives no power, and the energy counter is not used: {judged.reason}"
            return _EnergySource(None, missing=missing)
        return _EnergySource(method, f"power is integrated, because the energy counter is not used: {judged.reason}")

    def _read_for_comparison(self) -> list[CounterReading]:
        readings: list[CounterReading] = []
        while not readings or readings[-1].time_s + CHECK_EVERY_S < readings[0].time_s + CHECK_S:
            if readings:
                self._sleep(CHECK_EVERY_S)
            before_s = self._clock()
            answer = calls.try_call(self._smi, "amdsmi_get_energy_count", self._handle)
            time_s = (before_s + self._clock()) / 2
            powers = calls.read_or_empty(self._smi, calls.read_power, self._handle)
            power_w = powers.get("power_w", powers.get("power_average_w"))
            readings.append(CounterReading(time_s, calls.joules_of(answer), power_w))
        return readings

    def _make_device(self, processor: Processor, source: _EnergySource) -> Device:
        smi, handle = self._smi, processor.handle
        fields = {"memory": ("memory_bytes",), "utilization": ("utilization",), "power": ("power_w", "power_average_w")}
        missing = [f"{what}: not reported by AMD SMI" for what in fields if not self._has_field(*fields[what])]
        default_w = calls.read_or_empty(smi, calls.read_default_power_limit, handle).get("power_limit_default_w")
        max_hz = calls.read_or_empty(smi, calls.read_max_gfx_clock, handle).get("sm_clock_max_hz") or None
        vram = smi.AmdSmiMemoryType.VRAM
        total_bytes = calls.number(calls.try_call(smi, "amdsmi_get_gpu_memory_total", handle, vram), (64,))
        return Device(
            key=processor.key(self._host),
            kind="amd",
            name=processor.model,
            memory_total_bytes=int(total_bytes) if total_bytes else None,
            power_limit_w=calls.read_or_empty(smi, calls.read_power_limit, handle).get("power_limit_w"),
            energy_method=source.method,
            power_scope=None if source.method is None else MODULE if processor.has_cpu else GPU,
            not_measured=(*missing, *((source.missing,) if source.missing else ())),
            energy_key=source.key,
            energy_note=source.note,
            sensor=_SENSOR,
            driver=calls.driver_of(smi, handle),
            # The published peaks of these GPUs are rates at the maximum clock.
            sm_clock_max_hz=max_hz,
            sm_clock_reference_hz=max_hz,
            power_limit_default_w=default_w,
        )

    def _read_groups(self, groups: Iterable[calls.Group]) -> tuple[int, dict[str, float], dict[str, str]]:
        """Return the time of the first call, the values, and the reasons for missing values."""
        values: dict[str, float] = {}
        failures: dict[str, str] = {}
        began_s = self._clock()
        middle_s: float | None = None
        for group in groups:
            fields = self._fields_by_group[group]
            if not fields:
                continue
            try:
                answer = group(self._smi, self._handle)
            except self._errors as error:
                failures |= dict.fromkeys(fields, calls.text_of_error(error))
            else:
                values |= {field: answer[field] for field in fields if field in answer}
                failures |= {field: "AMD SMI gave no value" for field in fields if field not in answer}
            if middle_s is None:
                middle_s = (began_s + self._clock()) / 2
        return round((began_s if middle_s is None else middle_s) * 1e9), values, failures

    def _throttled_by(self, failures: dict[str, str]) -> tuple[str, ...] | None:
        """Return the limits active since the last reading (``None`` at the first); on GPUs before MI300, active now."""
        before = self._residencies
        self._residencies, status = calls.read_throttling(self._smi, self._handle)
        if self._residencies:
            if before is None:
                return None
            return tuple(reason for reason, time in self._residencies.items() if time > before.get(reason, time))
        if status is None:
            failures["throttled_by"] = "AMD SMI gave no value"
            return None
        return ("unspecified",) if status else ()


def open_device(
    site: Site, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> AmdReader:
    """Open the GPU that this rank computes on, and compare its energy counter with its power for half a second.

    Raises:
        DeviceUnavailable: AMD SMI does not work here, or there is no GPU for this rank.
    """
    smi = calls.import_library()
    errors = calls.errors_of(smi)
    try:
        smi.amdsmi_init(smi.AmdSmiInitFlags.INIT_AMD_GPUS)
    except errors as error:
        raise DeviceUnavailable(calls.why_no_gpu(error)) from error
    try:
        processors = list_processors(smi)
        processor = whole_gpu(find_processor(site, processors), processors)
        calls.check_units(smi, processor.handle)
        return AmdReader(smi, processor, processors, site.host, clock, sleep)
    except Exception as error:
        with contextlib.suppress(*errors):
            smi.amdsmi_shut_down()
        if not isinstance(error, errors):
            raise
        raise DeviceUnavailable(
            f"AMD SMI finds no readable GPU for local rank {site.local_rank}: {calls.text_of_error(error)}"
        ) from error


class CounterReading(NamedTuple):
    """The counter and the power at one moment."""

    time_s: float
    energy_j: float | None
    power_w: float | None


class CounterJudgement(NamedTuple):
    """The result of the comparison; ``reason`` describes a fault or a missing check."""

    is_good: bool
    reason: str = ""


def judge_counter(readings: Sequence[CounterReading]) -> CounterJudgement:
    """Return whether an energy counter agrees with power, from readings of counter and power over half a second.

    Some counters had a wrong rate (ROCm/amdsmi#38), some did not change (#22), some decreased (#115).
    """
    counted = [reading for reading in readings if reading.energy_j is not None]
    joules = [reading.energy_j for reading in counted if reading.energy_j is not None]
    if len(counted) < 3:
        return CounterJudgement(False, "too few readings")
    steps = [after - before for before, after in pairwise(joules)]
    span_s = counted[-1].time_s - counted[0].time_s
    if min(steps) < 0:
        return CounterJudgement(False, f"a decrease of {-min(steps):.3g} J")
    rises = [index for index, step in enumerate(steps, 1) if step > 0]
    if len(rises) < 2:
        return CounterJudgement(False, f"{'one change' if rises else 'no change'} in {span_s:.1f} s")
    # Energy is compared between two changes of the counter, because the counter changes at an unknown time between two
    # readings.
    first, last = rises[0], rises[-1]
    counted_j, span_s = joules[last] - joules[first], counted[last].time_s - counted[first].time_s
    power_j = _integral_of_power(counted[first : last + 1])
    if not power_j:
        return CounterJudgement(True, "no power reading for the comparison")
    if abs(counted_j - power_j) > COUNTER_TOLERANCE * power_j + 0.5 * span_s:  # AMD SMI returns whole watts
        return CounterJudgement(
            False, f"a count of {counted_j:.3g} J in {span_s:.1f} s, but {power_j:.3g} J from integrated power"
        )
    return CounterJudgement(True)


def _integral_of_power(readings: Sequence[CounterReading]) -> float | None:
    joules = 0.0
    for first, second in pairwise(readings):
        if first.power_w is None or second.power_w is None:
            return None
        joules += (first.power_w + second.power_w) / 2 * (second.time_s - first.time_s)
    return joules
