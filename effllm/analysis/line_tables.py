"""The tables `windows`, `ranks` and `events`, with one row per line of the JSON Lines files of runs.

A missing field of a line is its default, as in effllm/store/reader.py: a count is 0, any other value is null.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from effllm.analysis.column import (
    BOOL,
    JSON,
    KEYS,
    NUMBER,
    NUMBER_BY_NAME,
    TEXT,
    WHOLE,
    Column,
    LinesTable,
    metric_columns,
    quoted,
    read_json,
    value,
)
from effllm.records.rank import GAUGES
from effllm.store.regular_file import MAX_LINE_BYTES, lines_of

#: Files are copied into one file, because DuckDB needs 1 to 5 ms for each file; this is the size at which it is read.
MAX_COPY_BYTES = 256 * 2**20

_COUNTERS = {
    "tokens": "tokens without padding",
    "tokens_processed": "tokens with padding",
    "tokens_loss": "tokens with a label",
    "samples": "samples",
    "generated_tokens": "generated tokens, without prompts",
    "prompt_tokens": "tokens of the prompts of generated text",
    "counts_rejected": "calls whose counts were not whole numbers of at least 0",
}
_GAUGE = "STRUCT(mean DOUBLE, covered_s DOUBLE, least DOUBLE, most DOUBLE)"
_FORETOLD = 'STRUCT("value" DOUBLE, low DOUBLE, high DOUBLE)'
_SPREAD = "STRUCT(count BIGINT, least DOUBLE, p5 DOUBLE, median DOUBLE, p95 DOUBLE, most DOUBLE)"


def _count(name: str, unit: str, meaning: str, group: str = "") -> Column:
    """Return the column of a count; a missing field is 0."""
    return Column(name, WHOLE, unit, meaning, group + name, default="0")


def _counters(group: str = "") -> list[Column]:
    units = {"samples": "samples", "counts_rejected": "calls"}
    return [_count(name, units.get(name, "tokens"), text, group) for name, text in _COUNTERS.items()]


def _flag(name: str, meaning: str) -> Column:
    return Column(name, BOOL, "", meaning, default="false")


_COVERAGE = {
    "ranks_expected": ("ranks", "ranks of the job"),
    "ranks_reporting": ("ranks", "ranks with a report of the window"),
    "gpus_expected": ("GPUs", "GPUs of the job"),
    "gpus_measured": ("GPUs", "GPUs with a measurement in the window"),
    "reports_lost": ("reports", "reports that never arrived, in the run so far"),
    "reports_late": ("reports", "reports after the end of their window, in the run so far"),
}
_SHARES = {
    "energy": "measured share of the device-seconds of the window: energy",
    "memory": "the same share of memory",
    "utilization": "the same share of utilization",
}
#: Sums over the window: fields of `last`.
_SUMS = (
    _count("iterations", "iterations", "iterations that ended in the window", "last."),
    *_counters("last."),
    _count("losses_not_finite", "losses", "losses that were NaN or infinite", "last."),
    Column("time_s", NUMBER, "s", "time of the iterations of the slowest rank (T)", "last.time_s", default="0"),
    Column("wait_s", NUMBER, "s", "data wait of this rank", "last.wait_s", default="0"),
    Column("generation_s", NUMBER, "s", "longest generation time of a rank", "last.generation_s", default="0"),
    Column("energy_j", NUMBER, "J", "energy of all devices, if the coverage is sufficient", "last.energy_j"),
    Column("energy_error_j", NUMBER, "J", "its random error: half-width, 95 %", "last.energy_error_j"),
    Column("energy_gain_error_j", NUMBER, "J", "its systematic error: half-width, 95 %", "last.energy_gain_error_j"),
    Column("energy_time_s", NUMBER, "s", "part of time_s with this energy", "last.energy_time_s"),
    Column("energy_tokens", WHOLE, "tokens", "part of tokens with this energy", "last.energy_tokens"),
    Column("energy_measured_j", NUMBER, "J", "measured energy, also with less coverage", "last.energy_measured_j"),
    Column("memory_mean_bytes", NUMBER, "bytes", "mean over devices of the memory in use", "last.memory_mean_bytes"),
    Column("utilization_mean", NUMBER, "ratio", "mean over devices of the utilization", "last.utilization_mean"),
    Column("throttled_s", NUMBER, "GPU-s", "time in which heat or the board lowered the clock", "last.throttled_s"),
    Column("temperature_max_c", NUMBER, "degC", "highest temperature of a GPU", "last.temperature_max_c"),
    Column("sm_clock_hz", NUMBER, "Hz", "clock of the streaming multiprocessors, mean over GPUs", "last.sm_clock_hz"),
)


WINDOWS = LinesTable(
    "windows",
    "windows-*.jsonl",
    ("attempt", "window_number", "end_time_s"),
    (
        *KEYS,
        Column("attempt", WHOLE, "", "number of the start of the job"),
        Column("window_number", WHOLE, "", "number of the window in the attempt", "window"),
        Column("iteration", WHOLE, "", "number of the last iteration, as shown to users"),
        Column("iteration_first", WHOLE, "", "first iteration of the window, counted from the start of the attempt"),
        Column("iteration_last", WHOLE, "", "last iteration of the window, counted from the start of the attempt"),
        Column("total_iterations", WHOLE, "iterations", "length of the job; null if unknown"),
        Column("end_time_s", NUMBER, "s (unix)", "time at which the last rank ended the window", "time_s"),
        Column("forecast", f"MAP(VARCHAR, {_FORETOLD})", "", "end of the job at the rate so far, by name"),
        Column("loss", NUMBER, "", "last loss of the window; null if it was not finite or not recorded"),
        _flag("simulated", "whether no hardware was measured"),
        _flag("warming_up", "whether the run-to-date values start later"),
        _flag("final", "whether this is the last window of the attempt"),
        _flag("correction", "whether the line has only late reports of an earlier window; sums include this line"),
        _flag("energy_doubtful", "whether the energy of the window has a random error above 5 %"),
        Column("power_scope", TEXT, "", "scope of the energy: gpu, module, cpu or node-psu"),
        *(Column(name, WHOLE, unit, text, f"coverage.{name}") for name, (unit, text) in _COVERAGE.items()),
        *(Column(f"{name}_coverage", NUMBER, "ratio", text, f"coverage.{name}") for name, text in _SHARES.items()),
        *_SUMS,
        Column("straggler_rank", WHOLE, "", "the slowest rank, if it is slow in many windows", "straggler.rank"),
        Column("straggler_step_s", NUMBER, "s", "own time of this rank in an iteration", "straggler.time_s"),
        Column("straggler_median_s", NUMBER, "s", "median of the own times of its peers", "straggler.median_s"),
        Column("time_by_class", NUMBER_BY_NAME, "s", "time of the run so far by class"),
        Column("energy_by_class", NUMBER_BY_NAME, "J", "measured energy of the run so far by class"),
        Column("spread", f"MAP(VARCHAR, {_SPREAD})", "", "distributions over ranks or GPUs, by name"),
        Column("stragglers", JSON, "", "current stragglers, the costliest first"),
        Column("instruments", JSON, "", "values of instruments in the window, by name"),
        *metric_columns(in_windows=True).values(),
    ),
)

RANKS = LinesTable(
    "ranks",
    "ranks-*.jsonl",
    ("attempt", "rank", "window_number", "end_time_s"),
    (
        *KEYS,
        Column("attempt", WHOLE, "", "number of the start of the job"),
        Column("rank", WHOLE, "", "number of the rank"),
        Column("window_number", WHOLE, "", "number of the window in the attempt", "window"),
        Column("host", TEXT, "", "host of the rank"),
        Column("device", TEXT, "", "key of the rank's first device: the UUID of a GPU"),
        Column("iteration_shown", WHOLE, "", "number of the last iteration, as shown to users", default="0"),
        Column("iteration_first", WHOLE, "", "first iteration, counted from the start of the attempt"),
        Column("iteration_last", WHOLE, "", "last iteration, counted from the start of the attempt"),
        Column("start_time_s", NUMBER, "s (unix)", "start of the window on this rank"),
        Column("end_time_s", NUMBER, "s (unix)", "end of the window on this rank"),
        Column("wall_s", NUMBER, "s", "duration of the window"),
        Column("busy_s", NUMBER, "s", "time in the steps"),
        Column("wait_s", NUMBER, "s", "time between the steps, without the phases"),
        Column("own_steps", WHOLE, "iterations", "iterations of which the own time is known", default="0"),
        Column("own_step_s", NUMBER, "s", "their time up to the first wait for other ranks", default="0"),
        Column("generation_s", NUMBER, "s", "generation time in steps and in phases", default="0"),
        Column("loss", NUMBER, "", "last loss of the window; null if it was not finite or not recorded"),
        _count("losses_not_finite", "losses", "losses that were NaN or infinite"),
        *_counters(),
        _count("iterations_overrun", "iterations", "iterations of which only the sums are known"),
        Column("energy_j", NUMBER, "J", "energy of the first device in the window"),
        Column("energy_error_j", NUMBER, "J", "its random error: half-width, 95 %"),
        Column("energy_gain_error", NUMBER, "ratio", "its systematic error: half-width, 95 %"),
        Column("energy_estimated_j", NUMBER, "J", "part that was computed from power, in gaps of the counter"),
        Column("energy_covered_s", NUMBER, "s", "time with measured energy", default="0"),
        Column("energy_method", TEXT, "", "source of the energy: counter, instant power or average power"),
        Column(
            "memory_byte_seconds", NUMBER, "byte-s", "integral of the memory in use; divided by the next column: mean"
        ),
        Column("memory_covered_s", NUMBER, "s", "time with measured memory", default="0"),
        Column("memory_peak_bytes", NUMBER, "bytes", "largest memory in use"),
        Column("utilization_seconds", NUMBER, "s", "integral of the utilization; divided by the next column: mean"),
        Column("utilization_covered_s", NUMBER, "s", "time with measured utilization", default="0"),
        Column("power_peak_w", NUMBER, "W", "largest power reading"),
        Column("coverage", NUMBER, "ratio", "measured share of wall_s"),
        *(
            Column(f"{name}_mean", NUMBER, unit, f"mean: {help_}", sql=f"gauges['{name}'].mean")
            for name, (unit, help_) in GAUGES.items()
        ),
        Column("gauges", f"MAP(VARCHAR, {_GAUGE})", "", "means with their covered seconds, and extremes, by name"),
        Column("throttled_s", NUMBER_BY_NAME, "s", "time with a lowered clock, by reason; reasons may overlap"),
        Column("phases_s", NUMBER_BY_NAME, "s", "time outside the iterations, by phase"),
        Column("phases_j", NUMBER_BY_NAME, "J", "part of energy_j in each phase"),
        Column("other_devices_j", NUMBER_BY_NAME, "J", "energy of the rank's other devices, by key"),
        Column("device_steps", WHOLE, "iterations", "iterations timed on the device", default="0"),
        Column("device_step_s", NUMBER, "s", "sum of the iteration times on the device", default="0"),
        Column("profile_iterations", WHOLE, "iterations", "profiled iterations", "profile.iterations"),
        Column("profile_time_s", NUMBER, "s", "time of the profiled iterations", "profile.time_s"),
        Column("profile_communication_s", NUMBER, "s", "part with communication", "profile.communication_s"),
        Column(
            "profile_exposed_s", NUMBER, "s", "part with communication and without computation", "profile.exposed_s"
        ),
        Column("profile_computing_s", NUMBER, "s", "part with computation", "profile.computing_s"),
        _flag("final", "whether this is the rank's last report"),
        _flag("simulated", "whether no hardware was measured"),
    ),
)

EVENTS = LinesTable(
    "events",
    "events.jsonl",
    ("time_s", "kind"),
    (
        *KEYS,
        Column("time_s", NUMBER, "s (unix)", "time of the event, by the clock of its host"),
        Column("kind", TEXT, "", "kind of the event: docs/events.md"),
        Column("text", TEXT, "", "the event as a sentence"),
        Column("rank", WHOLE, "", "rank of the event; null for an event of the job"),
        Column("device", TEXT, "", "key of the device; null if the event concerns no device"),
        Column("attempt", WHOLE, "", "number of the start of the job", default="0"),
        Column("count", WHOLE, "events", "number of events of this line", default="1"),
    ),
)

LINE_TABLES = {table.name: table for table in (WINDOWS, RANKS, EVENTS)}


class LineFile(NamedTuple):
    """A JSON Lines file of a run."""

    folder: str  # path of the run folder
    run_id: str
    path: Path


def insert_lines(
    connection: Any, table: LinesTable, files: Sequence[LineFile], folder: str
) -> Iterator[tuple[Path, int]]:
    """Insert the lines of files into a table, in order; yield files with incomplete or invalid lines, and the number.

    The temporary file is in ``folder``, which is private.

    Raises:
        OSError: a file cannot be read, or the temporary file cannot be written.
    """
    # A line of a hostile run must not name another run, so the name of the field is a secret.
    key = f"run_{secrets.token_hex(8)}"
    while files:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".jsonl") as copy:
            counts = _copy(files, copy, key)
            yield from _insert(connection, table, files[: len(counts)], counts, copy.name, key)
            files = files[len(counts) :]


def _copy(files: Sequence[LineFile], copy: IO[bytes], key: str) -> list[int]:
    """Copy the first files, each line with the index of its file; return the number of lines of each file."""
    counts: list[int] = []
    size = 0
    for index, one in enumerate(files):
        if size > MAX_COPY_BYTES:
            break
        begin, count = b'{"%b":%d,' % (key.encode(), index), 0
        for line in lines_of(one.path):
            if not line.isspace():
                is_object = line.startswith(b'{"') and len(line) < MAX_LINE_BYTES
                size += copy.write(b"%b%b\n" % (begin, line[1:].rstrip(b"\n")) if is_object else b"null\n")
                count += 1
        counts.append(count)
    copy.flush()
    return counts


def _insert(
    connection: Any, table: LinesTable, files: Sequence[LineFile], counts: Sequence[int], path: str, key: str
) -> Iterator[tuple[Path, int]]:
    values = ", ".join(f"{value(one)} AS {quoted(one.name)}" for one in table.columns)
    read = read_json("$1", {**table.fields(), key: WHOLE})
    # Lists of the folders instead of a join, because a join changes the order of the lines.
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE lines AS SELECT file, {values} FROM (SELECT *, {key} AS file, "
        f"($2::VARCHAR[])[{key} + 1] AS folder, ($3::VARCHAR[])[{key} + 1] AS run_id FROM {read})",
        [path, [one.folder for one in files], [one.run_id for one in files]],
    )
    valid = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in ("folder", *table.required))
    connection.execute(f"INSERT INTO {table.name} SELECT * EXCLUDE (file) FROM lines WHERE {valid}")
    known = dict(connection.execute(f"SELECT file, count(*) FROM lines WHERE {valid} GROUP BY file").fetchall())
    connection.execute("DROP TABLE lines")
    for number, (one, count) in enumerate(zip(files, counts, strict=True)):
        if invalid := count - known.get(number, 0):
            yield one.path, invalid
