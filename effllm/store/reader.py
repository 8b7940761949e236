"""The lines of the files in a run folder, and their reader, which skips torn lines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from effllm.records.job import ClusterReport, ClusterTotals, Counted, JobConstants, WindowReport
from effllm.records.rank import Count, DeviceWindow, Duration, Integrals, Ordinal, Profile, RankReport
from effllm.store import own_files
from effllm.store.regular_file import lines_of

#: The errors of decoding JSON of any bytes.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_SEGMENT = re.compile(r"(?:-(\d{4,}))?\.jsonl")

Row = TypeVar("Row", bound=Struct)

#: Significant digits of a number in a line: no sensor has as many, and further digits are rounding errors of sums.
DIGITS = 12
_UNIX_TIMES = frozenset({"start_time_s", "end_time_s"})  # unix times are not rounded to DIGITS


class WindowLine(WindowReport, frozen=True, kw_only=True):
    """A line of ``windows-*.jsonl``: one window of the whole job, with totals in the form of `totals_by_key`.

    Totals to date are in the first line, in the last line, in corrections, and in one line every `TOTALS_EVERY_S`.
    """

    last: dict[str, Any]
    run: dict[str, Any] | None = None
    job: dict[str, Any] | None = None
    constants: JobConstants | None = None  # constants of this and the next lines


def window_line(report: ClusterReport, *, has_totals: bool) -> WindowLine:
    """Return the line of a report, without the job's constants, and with totals to date only if ``has_totals``."""
    fields = {name: getattr(report, name) for name in WindowReport.__struct_fields__}
    # JSON has no nan: a nan would make the whole line unreadable.
    fields["values"] = {tag: _rounded(value) for tag, value in report.values.items() if math.isfinite(value)}
    for base in ("last", "run", "job") if has_totals else ("last",):
        fields[base] = totals_by_key(getattr(report, base))
    return WindowLine(**fields)


#: Groups of `ClusterTotals` whose fields are keys of the totals in a line. The fields of the group `constants` are keys
#: of the line's field `constants`.
_GROUPS = ("counts", "loop", "devices", "health", "goodput")
#: Keys of energy whose names differ from the fields of `JobEnergy`.
_ENERGY = {"joules": "energy_j", "gain_j": "energy_gain_error_j", "is_complete": "energy_complete"}
_ENERGY |= {name: f"energy_{name}" for name in ("time_s", "estimated_j", "measured_j", "gpus_j")}


def totals_by_key(totals: ClusterTotals) -> dict[str, Any]:
    """Return totals as an object of a line: rounded numbers by key, without defaults."""
    keys: dict[str, Any] = {}
    for group in _GROUPS:
        keys |= _values_besides_defaults(getattr(totals, group))
    energy = totals.energy
    keys |= {f"energy_{name}": count for name, count in _values_besides_defaults(energy.counts).items()}
    keys |= {_ENERGY[name]: value for name, value in _values_besides_defaults(energy).items() if name in _ENERGY}
    if energy.joules is not None:
        keys |= {"energy_error_j": _rounded(energy.error_j)}
    keys |= {name: value for name in ("profile", "overhead") if (value := getattr(totals, name)) is not None}
    return keys


def _values_besides_defaults(record: Struct) -> dict[str, Any]:
    """Return the fields of a record that differ from their defaults, rounded."""
    values = zip(_defaults(type(record)), attrgetter(*record.__struct_fields__)(record), strict=True)
    return {name: _rounded_value(value) for (name, default), value in values if value != default}


def _rounded_value(value: Any) -> Any:
    if isinstance(value, float):
        return _rounded(value)
    return {key: _rounded_value(item) for key, item in value.items()} if isinstance(value, dict) else value


def _rounded_row(row: Row) -> Row:
    """Return a record with rounded numbers; an encoded record has no default values."""
    changes = {}
    for name, default in _defaults(type(row)):
        value = getattr(row, name)
        if value == default:
            changes[name] = default  # msgspec omits a number only if it is the same object as the default
        elif isinstance(value, float) and name not in _UNIX_TIMES:
            changes[name] = _rounded(value)
    return msgspec.structs.replace(row, **changes)


@cache
def _defaults(record_type: type[Struct]) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in msgspec.structs.fields(record_type)]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


class GaugeRow(Struct, frozen=True):
    """A gauge over a window: its mean over the covered seconds, and its extremes."""

    mean: float
    covered_s: float
    least: float
    most: float


class RankRow(Counted, Struct, frozen=True, omit_defaults=True):
    """A line of ``ranks-*.jsonl``: one rank's window, with the readings of its first device."""

    attempt: Count
    rank: Count
    window: Count
    iteration_first: Ordinal
    iteration_last: Ordinal
    start_time_s: float
    end_time_s: float
    wall_s: Duration
    busy_s: Duration
    wait_s: Duration
    host: str | None = None
    device: str | None = None
    iteration_shown: int = 0
    loss: float | None = None
    losses_not_finite: int = 0
    phases_s: dict[str, float] = {}
    phases_j: dict[str, float | None] = {}  # part of energy_j in each phase
    energy_j: float | None = None
    energy_error_j: float | None = None
    energy_gain_error: float | None = None
    energy_covered_s: float = 0.0
    memory_byte_seconds: float | None = None
    memory_covered_s: float = 0.0
    memory_peak_bytes: float | None = None
    utilization_seconds: float | None = None
    utilization_covered_s: float = 0.0
    power_peak_w: float | None = None
    coverage: float | None = None  # measured share of wall_s, from `coverage_of`
    other_devices_j: dict[str, float | None] = {}  # energy of the other devices, by key
    final: bool = False
    iterations_overrun: int = 0
    simulated: bool = False
    energy_method: str | None = None
    energy_estimated_j: float | None = None  # part of energy_j that is computed from power, in gaps of the counter
    throttled_s: dict[str, float] = {}  # seconds by reason
    gauges: dict[str, GaugeRow] = {}  # by the names in effllm.records.rank.GAUGES
    generation_s: float = 0.0
    profile: Profile | None = None  # sum of the profiled iterations
    device_steps: int = 0
    device_step_s: float = 0.0
    own_steps: int = 0
    own_step_s: float = 0.0


#: The fields that a report and its line have in common.
_REPORT_FIELDS = tuple(name for name in RankRow.__struct_fields__ if name in RankReport.__struct_fields__)
_report_values = attrgetter(*_REPORT_FIELDS)


def rank_row(report: RankReport, *, attempt: int, host: str | None, simulated: bool) -> RankRow:
    """Return the line of a report, rounded: its totals, and the readings of the rank's first device."""
    device = report.devices[0] if report.devices else DeviceWindow("", Integrals())
    wall, energy = device.wall, device.wall.energy
    has_energy = energy.joules is not None
    row = RankRow(
        attempt=attempt,
        host=host,
        device=device.device or None,
        phases_j={name: part.energy.joules for name, part in device.phases.items()},
        energy_j=energy.joules,
        energy_error_j=energy.error_j if has_energy else None,
        energy_gain_error=round(energy.gain_j / energy.joules, 9) if energy.joules else None,
        energy_estimated_j=energy.estimated_j if has_energy else None,
        energy_method=device.energy_method,
        energy_covered_s=energy.covered_s,
        memory_byte_seconds=wall.memory_byte_seconds,
        memory_covered_s=wall.memory_covered_s,
        memory_peak_bytes=device.memory_peak_bytes,
        utilization_seconds=wall.utilization_seconds,
        utilization_covered_s=wall.utilization_covered_s,
        power_peak_w=device.power_peak_w,
        coverage=coverage_of(report),
        other_devices_j={other.device: other.wall.energy.joules for other in report.devices[1:]},
        simulated=simulated,
        throttled_s=device.throttled_s,
        gauges={
            name: GaugeRow(gauge.value_seconds / gauge.covered_s, gauge.covered_s, gauge.least, gauge.most)
            for name, gauge in device.gauges.items()
            if gauge.covered_s > 0
        },
        **dict(zip(_REPORT_FIELDS, _report_values(report), strict=True)),
    )
    return _rounded_row(row)


def coverage_of(report: RankReport) -> float | None:
    """Return the share of a window with measured energy; without energy, return the share with measured memory."""
    if not report.devices or report.wall_s <= 0:
        return None
    wall = report.devices[0].wall
    if wall.energy.joules is not None:
        return min(wall.energy.covered_s / report.wall_s, 1.0)
    return None if wall.memory_byte_seconds is None else min(wall.memory_covered_s / report.wall_s, 1.0)


def segments(folder: Path, stem: str) -> list[Path]:
    """Return the existing files ``<stem>-0001.jsonl`` and following, in order."""
    return list(segments_by_number(folder, stem).values())


def segments_by_number(folder: Path, stem: str) -> dict[int, Path]:
    """Return the files as `segments`, each with its number; the number of a single file ``<stem>.jsonl`` is 0."""
    paths = {
        int(match[1] or 0): path
        for path in folder.glob(f"{stem}*")
        if (match := _SEGMENT.fullmatch(path.name[len(stem) :]))
    }
    return dict(sorted(paths.items()))


def read_own_json(path: Path, kind: type[Row]) -> Row | None:
    """Return the content of a JSON file of this user; ``None`` if it cannot be read or has another form."""
    try:
        return msgspec.json.decode(own_files.read_file(path), type=kind)
    except (OSError, *DECODE_ERRORS):
        return None


class JsonLines(Generic[Row]):
    """The decoded lines of JSON Lines files; torn and invalid lines are skipped and counted.

    With ``max_bytes``, only the lines in the last bytes of the files are read.
    """

    def __init__(self, paths: Sequence[Path], row: type[Row], max_bytes: int | None = None) -> None:
        self.num_skipped = 0
        self.unread_bytes = 0
        self._paths, self._max_bytes = paths, max_bytes
        self._decode: Callable[[bytes], Row] = msgspec.json.Decoder(row).decode

    def __iter__(self) -> Iterator[Row]:
        self.num_skipped = skip_bytes = 0
        if self._max_bytes is not None:
            self.unread_bytes = skip_bytes = max(sum(path.stat().st_size for path in self._paths) - self._max_bytes, 0)
        for path in self._paths:
            if skip_bytes and skip_bytes >= (size := path.stat().st_size):
                skip_bytes -= size
                continue
            for line in lines_of(path, skip_bytes):
                if line.isspace():  # a writer that continues after a torn line leaves an empty line
                    continue
                try:
                    row = self._decode(line)
                except DECODE_ERRORS:
                    self.num_skipped += 1
                    continue
                yield row
            skip_bytes = 0
