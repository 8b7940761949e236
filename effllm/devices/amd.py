"""An AMD GPU, read through AMD SMI and known by its unique id, never by an index.

Not run on an AMD GPU.  Names, units and shapes are those of the sources of the Python package amdsmi, ROCm 5.7
to 7.0, of its C library, and of the amdgpu driver; what they leave open is said where it matters.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from effllm.devices import DeviceUnavailable, Site
from effllm.schema import AVERAGE, COUNTER, GAUGES, GPU, INSTANT, MODULE, Device, Sample, Sensor

# amdsmi_status_t, equal in all releases.
_NOT_SUPPORTED, _NOT_YET_IMPLEMENTED, _NO_PERMISSION, _DRIVER_NOT_LOADED = 2, 3, 10, 34
_LACKING = (_NOT_SUPPORTED, _NOT_YET_IMPLEMENTED, _NO_PERMISSION)

_DEVICE_NODES = Path("/dev")
_NO_ACCESS = "this user may not open the AMD GPUs: grant access to /dev/kfd and /dev/dri (groups render and video)"

# The driver reads the sensors at most once a millisecond (ROCm/legacy-rocm-build#1649).  Over how long
# the power that it calls average is a mean, AMD does not say; "around 100 ms" (ROCm/ROC-smi#89).
_SENSOR = Sensor(lag_error_s=0.1, average_s=0.1)

#: An energy counter is read against power for so long when a device is opened ...
CHECK_S = 0.5
_CHECK_EVERY_S = 0.02
#: ... and not used where they differ by more.  Power read as a mean of 100 ms lags by up to 13 % of half a
#: second in which it rises fivefold; counters were found slow by a factor of 100, still, and going back.
COUNTER_TOLERANCE = 0.25

_FOUR_LINKS_MB_PER_S = 200_000

_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0

#: Accumulated times in which a limit held the GPU back, MI300 and later.
_RESIDENCIES = {
    "prochot": "prochot_residency_acc",
    "power_cap": "ppt_residency_acc",
    "socket_thermal": "socket_thm_residency_acc",
    "vr_thermal": "vr_thm_residency_acc",
    "hbm_thermal": "hbm_thm_residency_acc",
}


def _number(value: Any, bits: Sequence[int] = (16, 32, 64)) -> float | None:
    """Return a reading as a number.

    Where there is none AMD SMI gives "N/A", or up to ROCm 6.0 all bits of the driver's field set.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if value in [2**width - 1 for width in bits] else float(value)


def _scaled(scale: float, **answers: Any) -> dict[str, float]:
    numbers = {field: _number(answer) for field, answer in answers.items()}
    return {field: number * scale for field, number in numbers.items() if number is not None}


def _joules(answer: dict[str, Any]) -> float | None:
    # Called "power" up to ROCm 6.2, both in 6.3.
    count = _number(answer.get("energy_accumulator", answer.get("power")), (64,))
    microjoules = _number(answer.get("counter_resolution"))
    return None if count is None or microjoules is None else count * microjoules / 1e6


def _energy(smi: Any, handle: Any) -> dict[str, float]:
    joules = _joules(smi.amdsmi_get_energy_count(handle))
    return {} if joules is None else {"energy_j": joules}


def _power(smi: Any, handle: Any) -> dict[str, float]:
    # MI300 and later give "current", all before them "average"; 7.0 adds "socket_power", whichever there is.
    info = smi.amdsmi_get_power_info(handle)
    named = _scaled(1.0, power_w=info.get("current_socket_power"), power_average_w=info.get("average_socket_power"))
    return named or _scaled(1.0, power_w=info.get("socket_power"))


def _memory(smi: Any, handle: Any) -> dict[str, float]:
    # In bytes; amdsmi_get_gpu_vram_usage gives MiB.
    used = _number(smi.amdsmi_get_gpu_memory_usage(handle, smi.AmdSmiMemoryType.VRAM), (64,))
    return {} if used is None else {"memory_bytes": used}


def _activity(smi: Any, handle: Any) -> dict[str, float]:
    answer = smi.amdsmi_get_gpu_activity(handle)
    ratios = _scaled(0.01, utilization=answer.get("gfx_activity"), dram_activity_ratio=answer.get("umc_activity"))
    return {field: ratio for field, ratio in ratios.items() if 0 <= ratio <= 1}


def _temperature(smi: Any, handle: Any) -> dict[str, float]:
    # In degrees, whatever the documentation of 6.x says: the library divides the driver's by 1000.
    # The hottest spot, for MI300 has no other.
    sensor, metric = smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric.CURRENT
    return _scaled(1.0, temperature_c=smi.amdsmi_get_temp_metric(handle, sensor, metric))


def _gfx_clock(smi: Any, handle: Any) -> dict[str, float]:
    answer = smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)
    return _scaled(1e6, sm_clock_hz=answer.get("clk", answer.get("cur_clk")))  # the latter up to ROCm 6.1


def _memory_clock(smi: Any, handle: Any) -> dict[str, float]:
    answer = smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.MEM)
    return _scaled(1e6, memory_clock_hz=answer.get("clk", answer.get("cur_clk")))


def _power_limit(smi: Any, handle: Any) -> dict[str, float]:
    cap = _number(smi.amdsmi_get_power_cap_info(handle).get("power_cap"), (32, 64))
    if not cap:  # 0 on the second die of a card, whose limit is the first one's
        return {}
    # Watts up to ROCm 6.1, microwatts since; no limit lies between 0.1 W and 100 kW in the other unit.
    return {"power_limit_w": cap / 1e6 if cap >= 1e5 else cap}


Group = Callable[[Any, Any], dict[str, float]]

#: What is read, a call each, and the fields that a call may fill.  Energy and power come first: their
#: time is the sample's.
_GROUPS: dict[Group, tuple[str, ...]] = {
    _energy: ("energy_j",),
    _power: ("power_w", "power_average_w"),
    _memory: ("memory_bytes",),
    _activity: ("utilization", "dram_activity_ratio"),
    _temperature: ("temperature_c",),
    _gfx_clock: ("sm_clock_hz",),
    _memory_clock: ("memory_clock_hz",),
    _power_limit: ("power_limit_w",),
}
#: What the library takes from one table of the driver, and repeats where it repeats that.
_FROM_TABLE = (_energy, _power, _activity, _gfx_clock, _memory_clock)


def _errors(smi: Any) -> tuple[type[Exception], ...]:
    """Return what a call may raise.

    Beside the library's own: a function that this release lacks, and the errors that its wrapper makes of
    answers that it did not expect (5.7 cannot even raise its AmdSmiRetryException).
    """
    return (smi.AmdSmiException, AttributeError, KeyError, OSError, TypeError, ValueError)


def _sentence(error: Exception) -> str:
    return " ".join(str(getattr(error, "err_info", "") or error).split()) or type(error).__name__


def _ask(smi: Any, call: str, *arguments: Any) -> Any:
    """Return the answer to a question that some release or GPU has none to: then an empty one."""
    with contextlib.suppress(*_errors(smi)):
        return getattr(smi, call)(*arguments)
    return {}


# --- which GPU ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Processor:
    """A GPU, one die of a two-die card, or a partition of a GPU: what AMD SMI has a handle for."""

    handle: Any
    bus: tuple[int, int, int, int]  # domain, bus, device, function
    serial: str  # 16 hexadecimal digits: the id that ROCm's UUIDs are made of; empty where the GPU tells none
    names: frozenset[str]  # by which the environment and torch may name it
    model: str
    is_half: bool  # one die of an MI250 or MI250X
    has_cpu: bool  # an MI300A, whose socket, and so its power and energy, has CPU and GPU in it

    def key(self, host: str) -> str:
        """Return the UUID that rocminfo shows and ROCR_VISIBLE_DEVICES takes, else the place in this host."""
        domain, bus, device, function = self.bus
        return f"GPU-{self.serial}" if self.serial else f"{host}-{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def _serial(answer: Any) -> str:
    """Return the unique id in 16 digits; some GPUs have none, and say so with zero, all bits or "N/A"."""
    try:
        number = int(str(answer), 16)
    except ValueError:
        return ""
    return f"{number:016x}" if 0 < number < 2**64 - 1 else ""


def _plain(uuid: str) -> str:
    """Return a UUID in small letters without prefix and hyphens."""
    return uuid.strip().lower().removeprefix("gpu-").replace("-", "")


def _without_ascii(plain: str) -> str:
    """Return the 16 digits that HIP, and so torch, gives as 16 letters instead of as a number of 16 bytes."""
    try:
        letters = bytes.fromhex(plain).decode("ascii").lower()
    except ValueError:
        return plain
    return letters if re.fullmatch("[0-9a-f]{16}", letters) else plain


def _bus_of(text: str) -> tuple[int, int, int, int] | None:
    found = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)\.([0-9a-f]+)", text.strip().lower())
    if found is None:
        return None
    domain, bus, device, function = (int(part, 16) for part in found.groups())
    return domain, bus, device, function


def _identify(smi: Any, handle: Any) -> Processor:
    bus = _bus_of(smi.amdsmi_get_gpu_device_bdf(handle))
    if bus is None:
        raise ValueError("AMD SMI gives no PCI bus id")
    asic = _ask(smi, "amdsmi_get_gpu_asic_info", handle)
    serial = _serial(asic.get("asic_serial"))
    names = {serial}
    if serial:  # else the UUID is made of the model alone, and all GPUs of a model have the same
        names |= {_plain(str(_ask(smi, "amdsmi_get_gpu_device_uuid", handle) or ""))}
    model = str(asic.get("market_name", "")).replace("N/A", "")
    device_id = str(asic.get("device_id")).lower()  # a number up to ROCm 6.0, hexadecimal text since
    is_half = "MI250" in model or device_id in {"0x7408", "0x740c", str(0x7408), str(0x740C)}
    has_cpu = "MI300A" in model or device_id in {"0x74a0", str(0x74A0)}
    return Processor(handle, bus, serial, frozenset(names - {""}), model, is_half, has_cpu)


def _list_processors(smi: Any) -> list[Processor]:
    """Return all processors in the order in which HIP counts them.

    That is the order of the driver's KFD nodes, not that of AMD SMI (pytorch#178398).  6.4 tells HIP's own
    number, 6.3 the node's; before that the PCI bus has to do, which is the same order on most machines.
    """
    found = []
    for handle in smi.amdsmi_get_processor_handles():
        with contextlib.suppress(*_errors(smi)):  # hidden from this container, or fallen off the bus
            found.append(_identify(smi, handle))
    found.sort(key=lambda one: one.bus)
    for call, field in (("amdsmi_get_gpu_enumeration_info", "hip_id"), ("amdsmi_get_gpu_kfd_info", "node_id")):
        answers = [_number(_ask(smi, call, one.handle).get(field), (32,)) for one in found]
        places = [place for place in answers if place is not None]
        if len(places) == len(found):
            return [one for _, one in sorted(zip(places, found, strict=True), key=itemgetter(0))]
    return found


def _shown(listed: str | None, processors: Sequence[Processor]) -> tuple[list[Processor], int]:
    """Return what a list of indices and UUIDs shows, up to its first invalid entry, and how long it is."""
    if listed is None:
        return list(processors), len(processors)
    shown: list[Processor] = []
    entries = [entry.strip() for entry in listed.split(",")]
    for entry in entries:
        if entry.isdecimal() and int(entry) < len(processors):
            shown.append(processors[int(entry)])
        elif named := [one for one in processors if _plain(entry) in one.names]:
            shown.append(named[0])
        else:
            break
    return shown, len(entries)


def _find(site: Site, processors: Sequence[Processor]) -> Processor:
    """Return the processor of the rank: by what torch says, else by what is shown to the rank.

    Raises:
        DeviceUnavailable: there is none for this rank.
    """
    if not processors:
        raise DeviceUnavailable(_advice(None))
    if site.cuda_pci_bus_id or site.cuda_uuid:
        return _find_as_torch_says(site, processors)
    # ROCm's runtime hides first, HIP counts within what is left, and knows CUDA's variable as its own.
    shown, entries = _shown(site.rocr_visible_devices, processors)
    hip = site.hip_visible_devices if site.hip_visible_devices is not None else site.visible_devices
    if hip is not None:
        shown, entries = _shown(hip, shown)
    # A launcher may show each rank its own GPU only; the local rank then counts ranks, not entries.
    position = 0 if entries == 1 else site.local_rank
    if position < len(shown):
        return shown[position]
    lists = {"ROCR": site.rocr_visible_devices, "HIP": site.hip_visible_devices, "CUDA": site.visible_devices}
    set_to = [f"{name}_VISIBLE_DEVICES={text!r}" for name, text in lists.items() if text is not None]
    source = " and ".join(set_to) or "this machine"
    number = f"only {len(shown)} usable" if shown else "no usable"
    raise DeviceUnavailable(
        f"local rank {site.local_rank} has no GPU: {source} shows {number} of the {len(processors)} here"
    )


def _find_as_torch_says(site: Site, processors: Sequence[Processor]) -> Processor:
    bus = _bus_of(site.cuda_pci_bus_id)
    names = {_plain(site.cuda_uuid), _without_ascii(_plain(site.cuda_uuid))}
    for matching in (
        [one for one in processors if bus is not None and one.bus[:3] == bus[:3]],
        [one for one in processors if one.names & names],
    ):
        if matching:
            return matching[0]
    which = site.cuda_pci_bus_id or site.cuda_uuid
    raise DeviceUnavailable(f"AMD SMI does not know the GPU {which} that torch uses: is it hidden from this container?")


def _whole(processor: Processor, processors: Sequence[Processor]) -> Processor:
    """Return the GPU of a partition: they differ in the function of their bus id only, and share its sensors."""
    return min((one for one in processors if one.bus[:3] == processor.bus[:3]), key=lambda one: one.bus)


# --- whose energy -------------------------------------------------------------------------------


def _is_second_die(smi: Any, processor: Processor) -> bool:
    """Whether this is the die of a card that reports neither power nor energy, for the other reports both dies'.

    The driver sets them to 0 there (aldebaran_get_gpu_metrics); rocm-smi, too, goes by the zero of the counter.
    """
    if not processor.is_half:
        return False
    joules = _joules(_ask(smi, "amdsmi_get_energy_count", processor.handle))
    return joules == 0 and not any(_ask_group(smi, _power, processor.handle).values())


def _first_die(smi: Any, second: Processor, processors: Sequence[Processor]) -> Processor | None:
    """Return the die that reports for a second one, where it can be seen.

    AMD SMI has no name for the card, but the dies of a card are joined by four links, and no others by more
    than two; the driver tells 50 GB/s a link (amdgpu_amdkfd_get_xgmi_bandwidth_mbytes).  Where it does not, it is
    taken to be the die before on the PCI bus, as on machines that were described (ml-energy/zeus#203).
    """
    others = [one for one in processors if one.is_half and one.bus != second.bus]
    call = "amdsmi_get_minmax_bandwidth_between_processors"
    widths = [_number(_ask(smi, call, second.handle, one.handle).get("max_bandwidth")) for one in others]
    if any(widths):
        joined = [one for one, width in zip(others, widths, strict=True) if (width or 0) >= _FOUR_LINKS_MB_PER_S]
    else:
        joined = sorted((one for one in others if one.bus < second.bus), key=lambda one: one.bus)[-1:]
    return joined[0] if joined and not _is_second_die(smi, joined[0]) else None


# --- whether the counter can be believed --------------------------------------------------------


class Reading(NamedTuple):
    """The counter and the power at one moment, and the driver's own time of the reading."""

    time_s: float
    energy_j: float | None
    power_w: float | None
    stamp: float | None = None


class Verdict(NamedTuple):
    """Whether a counter can be believed, and why not."""

    is_good: bool
    reason: str = ""
    is_stale: bool = False  # it is not the counter: nothing that is read changes


def judge_counter(readings: Sequence[Reading]) -> Verdict:
    """Return whether an energy counter agrees with power, from readings of both over half a second.

    Counters had a wrong rate (ROCm/amdsmi#38), stood still (#22) and went back (#115).
    """
    counted = [reading for reading in readings if reading.energy_j is not None]
    joules = [reading.energy_j for reading in counted if reading.energy_j is not None]
    if len(counted) < 3:
        return Verdict(False, "it could not be read")
    steps = [after - before for before, after in pairwise(joules)]
    span_s = counted[-1].time_s - counted[0].time_s
    if not any(steps) and counted[0].stamp and len({reading.stamp for reading in counted}) == 1:
        return Verdict(False, f"AMD SMI repeats one reading for {span_s:.1f} s", is_stale=True)
    if min(steps) < 0:
        return Verdict(False, f"it went back by {-min(steps):.3g} J")
    moves = [index for index, step in enumerate(steps, 1) if step > 0]
    if len(moves) < 2:
        return Verdict(False, f"it {'moved once' if moves else 'stood still'} in {span_s:.1f} s")
    # From move to move, so that it does not matter where between two readings the counter ticks.
    first, last = moves[0], moves[-1]
    counted_j, span_s = joules[last] - joules[first], counted[last].time_s - counted[first].time_s
    power_j = _integral_of_power(counted[first : last + 1])
    if not power_j:
        return Verdict(True, "there is no power to check it against")
    if abs(counted_j - power_j) > COUNTER_TOLERANCE * power_j + 0.5 * span_s:  # power comes in whole watts
        return Verdict(False, f"it counted {counted_j:.3g} J in {span_s:.1f} s in which power comes to {power_j:.3g} J")
    return Verdict(True)


def _integral_of_power(readings: Sequence[Reading]) -> float | None:
    joules = 0.0
    for first, second in pairwise(readings):
        if first.power_w is None or second.power_w is None:
            return None
        joules += (first.power_w + second.power_w) / 2 * (second.time_s - first.time_s)
    return joules


# --- the reader ---------------------------------------------------------------------------------


class _Source(NamedTuple):
    """How the energy of a device is come by: fields of the same names, or nearly, of a `Device`."""

    method: str | None
    note: str = ""
    missing: str = ""  # why there is none
    key: str = ""


class AmdReader:
    """An open GPU; while it is lost every quantity fails, and AMD SMI is initialised anew now and then."""

    def __init__(
        self,
        smi: Any,
        processor: Processor,
        processors: Sequence[Processor],
        host: str,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._smi, self._errors = smi, _errors(smi)
        self._handle, self._host = processor.handle, host
        self._clock, self._sleep = clock, sleep
        self._offered = self._try_all(processor)
        residencies, status = self._throttle()
        self._tells_throttling = bool(residencies) or status is not None
        self._residencies: dict[str, float] | None = None
        self.device = self._describe(processor, self._choose_source(processor, processors))
        self._retry_at_s = clock()
        self._retry_delay_s = _FIRST_RETRY_S
        self._open = True

    def read(self) -> tuple[Sample, dict[str, str]]:
        """Return the values of this moment; a quantity that fails is ``None``, with the reason beside it."""
        time_ns, values, failures = self._read_offered(_GROUPS)
        if failures and not values and self._reopen():
            time_ns, values, failures = self._read_offered(_GROUPS)
        if values:
            self._retry_delay_s = _FIRST_RETRY_S
        sample = Sample(
            time_ns=time_ns,
            memory_bytes=values.get("memory_bytes"),
            utilization=values.get("utilization"),
            power_w=values.get("power_w"),
            energy_j=values.get("energy_j"),
            power_average_w=values.get("power_average_w"),
            gauges={field: value for field, value in values.items() if field in GAUGES},
            throttled_by=self._throttled_by(failures) if self._tells_throttling else None,
        )
        return sample, failures

    def read_energy(self) -> tuple[Sample, dict[str, str]]:
        """Return energy and power alone: two calls instead of nine."""
        time_ns, values, failures = self._read_offered((_energy, _power))
        power_w, average_w, energy_j = (values.get(field) for field in ("power_w", "power_average_w", "energy_j"))
        sample = Sample(time_ns, power_w=power_w, energy_j=energy_j, power_average_w=average_w, energy_only=True)
        return sample, failures

    def close(self) -> None:
        """Let AMD SMI go; may be called twice."""
        if self._open:
            self._open = False
            with contextlib.suppress(*self._errors):
                self._smi.amdsmi_shut_down()

    # --- at the opening ---

    def _try_all(self, processor: Processor) -> dict[Group, tuple[str, ...]]:
        """Return what the GPU has, by group; what only fails just now, it has."""
        offered = {}
        for group, fields in _GROUPS.items():
            try:
                answer = group(self._smi, self._handle)
            except self._errors as error:
                is_lacking = getattr(error, "err_code", None) in _LACKING or isinstance(error, AttributeError)
                offered[group] = () if is_lacking else fields
            else:
                offered[group] = tuple(field for field in fields if field in answer)
        if "MI3" not in processor.model:
            # Of the bandwidth on MI300 (DramBandwidthUtilization), before it of the clock's domain.
            offered[_activity] = tuple(field for field in offered[_activity] if field != "dram_activity_ratio")
        return offered

    def _has(self, *fields: str) -> bool:
        return any(field in offered for offered in self._offered.values() for field in fields)

    def _choose_source(self, processor: Processor, processors: Sequence[Processor]) -> _Source:
        if _is_second_die(self._smi, processor):
            self._offered[_energy] = self._offered[_power] = ()
            first = _first_die(self._smi, processor, processors)
            where = (
                f"the other one, {first.key(self._host)}, has" if first else "the other one, not to be seen here, has"
            )
            missing = f"energy: this is the second die of its card; {where} that of both"
            return _Source(None, missing=missing, key=first.key(self._host) if first else "")
        source = self._counter_or_power()
        if processor.is_half and source.method:
            note = "; ".join(part for part in ("of both dies of the card", source.note) if part)
            return source._replace(note=note, key=processor.key(self._host))
        return source

    def _counter_or_power(self) -> _Source:
        verdict = judge_counter(self._look_at_counter()) if self._offered[_energy] else Verdict(False, "it has none")
        if verdict.is_stale:
            self._offered.update(dict.fromkeys(_FROM_TABLE, ()))
            return _Source(None, missing=f"energy: {verdict.reason}, as ROCm 6.0 did (ROCm/amdsmi#22)")
        if verdict.is_good:
            note = f"the energy counter is not checked: {verdict.reason}" if verdict.reason else ""
            return _Source(COUNTER, note)
        self._offered[_energy] = ()
        method = INSTANT if self._has("power_w") else AVERAGE if self._has("power_average_w") else None
        if method is None:
            missing = (
                f"energy: the energy counter of this GPU is not used, {verdict.reason}, and AMD SMI gives no power"
            )
            return _Source(None, missing=missing)
        return _Source(method, f"power is integrated, for the energy counter is not used: {verdict.reason}")

    def _look_at_counter(self) -> list[Reading]:
        readings: list[Reading] = []
        while not readings or readings[-1].time_s + _CHECK_EVERY_S < readings[0].time_s + CHECK_S:
            if readings:
                self._sleep(_CHECK_EVERY_S)
            before_s = self._clock()
            answer = _ask(self._smi, "amdsmi_get_energy_count", self._handle)
            time_s = (before_s + self._clock()) / 2
            with_power = _ask_group(self._smi, _power, self._handle)
            power_w = with_power.get("power_w", with_power.get("power_average_w"))
            readings.append(Reading(time_s, _joules(answer), power_w, _number(answer.get("timestamp"), (64,))))
        return readings

    def _describe(self, processor: Processor, source: _Source) -> Device:
        smi, handle = self._smi, processor.handle
        sentences = {
            "memory": ("memory_bytes",),
            "utilization": ("utilization",),
            "power": ("power_w", "power_average_w"),
        }
        missing = [f"{what}: AMD SMI does not give this GPU's" for what in sentences if not self._has(*sentences[what])]
        total = _number(_ask(smi, "amdsmi_get_gpu_memory_total", handle, smi.AmdSmiMemoryType.VRAM), (64,))
        return Device(
            key=processor.key(self._host),
            kind="amd",
            name=processor.model,
            memory_total_bytes=int(total) if total else None,
            power_limit_w=_ask_group(smi, _power_limit, handle).get("power_limit_w"),
            energy_method=source.method,
            power_scope=None if source.method is None else MODULE if processor.has_cpu else GPU,
            not_measured=(*missing, *((source.missing,) if source.missing else ())),
            energy_key=source.key,
            energy_note=source.note,
            sensor=_SENSOR,
            driver=_driver(smi, handle),
        )

    # --- at every reading ---

    def _read_offered(self, groups: Iterable[Group]) -> tuple[int, dict[str, float], dict[str, str]]:
        """Return when energy, or else power, was read, the values, and why there are none of others."""
        values: dict[str, float] = {}
        failures: dict[str, str] = {}
        began_s = self._clock()
        middle_s: float | None = None
        for group in groups:
            fields = self._offered[group]
            if not fields:
                continue
            try:
                answer = group(self._smi, self._handle)
            except self._errors as error:
                failures |= dict.fromkeys(fields, _sentence(error))
            else:
                values |= {field: answer[field] for field in fields if field in answer}
                failures |= {field: "AMD SMI gave no value" for field in fields if field not in answer}
            if middle_s is None:
                middle_s = (began_s + self._clock()) / 2
        return round((began_s if middle_s is None else middle_s) * 1e9), values, failures

    def _throttle(self) -> tuple[dict[str, float], bool | None]:
        """Return how long each limit has held the GPU back, and before MI300 whether any does now.

        Not by amdsmi_get_violation_status, which sleeps for a tenth of a second to compare two of these.
        """
        metrics = _ask(self._smi, "amdsmi_get_gpu_metrics_info", self._handle)
        residencies = {reason: _number(metrics.get(field), (64,)) for reason, field in _RESIDENCIES.items()}
        status = metrics.get("indep_throttle_status")  # the bits themselves up to ROCm 6.0, any of them since
        known = status if isinstance(status, bool) else None if (bits := _number(status, (64,))) is None else bits > 0
        return {reason: time for reason, time in residencies.items() if time is not None}, known

    def _throttled_by(self, failures: dict[str, str]) -> tuple[str, ...] | None:
        """Return the limits that held the GPU back at any time since the reading before."""
        before = self._residencies
        self._residencies, status = self._throttle()
        if self._residencies:
            if before is None:
                return None
            return tuple(reason for reason, time in self._residencies.items() if time > before.get(reason, time))
        if status is None:
            failures["throttled_by"] = "AMD SMI gave no value"
            return None
        return ("unspecified",) if status else ()

    def _reopen(self) -> bool:
        """Initialise AMD SMI anew where it is time to, for a handle does not outlive its GPU's loss."""
        now_s = self._clock()
        if not self._open or now_s < self._retry_at_s:
            return False
        self._retry_at_s = now_s + self._retry_delay_s
        self._retry_delay_s = min(2 * self._retry_delay_s, _LAST_RETRY_S)
        with contextlib.suppress(*self._errors):
            self._smi.amdsmi_shut_down()
        try:
            self._smi.amdsmi_init(self._smi.AmdSmiInitFlags.INIT_AMD_GPUS)
            processors = _list_processors(self._smi)
        except self._errors:
            return False  # the failures that led here are told already
        same = [one for one in processors if one.key(self._host) == self.device.key]
        if same:
            self._handle = _whole(same[0], processors).handle
        return bool(same)


def _ask_group(smi: Any, group: Group, handle: Any) -> dict[str, float]:
    with contextlib.suppress(*_errors(smi)):
        return group(smi, handle)
    return {}


def _driver(smi: Any, handle: Any) -> str:
    info, version = _ask(smi, "amdsmi_get_gpu_driver_info", handle), _ask(smi, "amdsmi_get_lib_version")
    driver = " ".join(part for name in ("driver_name", "driver_version") if (part := info.get(name, "N/A")) != "N/A")
    numbers = [str(version[part]) for part in ("year", "major", "minor", "release") if part in version]
    return ", ".join(part for part in (driver, numbers and f"AMD SMI {'.'.join(numbers)}") if part)


# --- opening ------------------------------------------------------------------------------------


def _import_library() -> Any:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # where it does not find its C library, it prints so
            import amdsmi
    except ImportError as error:
        raise DeviceUnavailable(
            "the Python package amdsmi is not installed: install that of your ROCm release, "
            "from /opt/rocm/share/amd_smi, or effllm[amd]"
        ) from error
    except (AttributeError, KeyError, OSError) as error:
        # The first two are how it fails where libamd_smi.so is not found, or another release's is.
        raise DeviceUnavailable(
            f"the Python package amdsmi cannot use libamd_smi.so ({type(error).__name__}: {error}): "
            "install ROCm's amd-smi-lib, of the package's release"
        ) from error
    return amdsmi


def _advice(error: Exception | None) -> str:
    """Return why there is no GPU, in a sentence."""
    code = getattr(error, "err_code", None)
    nodes = [_DEVICE_NODES / "kfd", *sorted((_DEVICE_NODES / "dri").glob("renderD*"))]
    present = [node for node in nodes if node.exists()]
    if code == _NO_PERMISSION or (present and not all(os.access(node, os.R_OK | os.W_OK) for node in present[:2])):
        return _NO_ACCESS
    if code == _DRIVER_NOT_LOADED:
        return "the amdgpu driver is not loaded: load it, or choose another device"
    if error is None:
        return "AMD SMI sees no GPU: give the container /dev/kfd and /dev/dri, or choose another device"
    return f"AMD SMI does not start: {_sentence(error)}"


def open_device(
    site: Site, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> AmdReader:
    """Open the GPU that this rank computes on, and compare its energy counter with its power for half a second.

    Raises:
        DeviceUnavailable: there is no AMD SMI here, or no GPU for this rank.
    """
    smi = _import_library()
    errors = _errors(smi)
    try:
        smi.amdsmi_init(smi.AmdSmiInitFlags.INIT_AMD_GPUS)
    except errors as error:
        raise DeviceUnavailable(_advice(error)) from error
    try:
        processors = _list_processors(smi)
        processor = _whole(_find(site, processors), processors)
        return AmdReader(smi, processor, processors, site.host, clock, sleep)
    except Exception as error:
        with contextlib.suppress(*errors):
            smi.amdsmi_shut_down()
        if not isinstance(error, errors):
            raise
        raise DeviceUnavailable(
            f"AMD SMI finds no readable GPU for local rank {site.local_rank}: {_sentence(error)}"
        ) from error
