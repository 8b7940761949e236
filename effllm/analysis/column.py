"""Columns of the tables of runs, with their documentation: how a column is read from a line, and those of `runs`.

The table `runs` has one row per run, from run.json and summary.json; line_tables.py has the other tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from effllm.metrics import METRICS

TEXT, WHOLE, NUMBER, BOOL, TIME, JSON = "VARCHAR", "BIGINT", "DOUBLE", "BOOLEAN", "TIMESTAMP", "JSON"
TEXTS, NUMBERS = "VARCHAR[]", "DOUBLE[]"
TEXT_BY_NAME, NUMBER_BY_NAME, WHOLE_BY_NAME = (f"MAP(VARCHAR, {one})" for one in (TEXT, NUMBER, WHOLE))


class Column(NamedTuple):
    """A column; the tables of docs/run-folder.md are made from these fields."""

    name: str  # with the unit, unless the values are texts, counts or ratios
    type: str  # of DuckDB
    unit: str
    meaning: str
    path: str = ""  # the field of a line, as "field" or "object.field"; "" is the field with the column's name
    default: str = ""  # value of a missing field; "" is null, or an empty map
    sql: str = ""  # an expression instead of a field


class LinesTable(NamedTuple):
    """A table of the lines of JSON Lines files."""

    name: str
    files: str  # glob of the names of the files in a run folder
    required: tuple[str, ...]  # columns without which a line is invalid
    columns: tuple[Column, ...]

    def fields(self) -> dict[str, str]:
        """Return the fields of a line that the columns need, with their types."""
        known: dict[str, str] = {}
        objects: dict[str, dict[str, str]] = {}
        for column in self.columns:
            group, dot, name = (column.path or column.name).partition(".")
            if dot and not column.sql:
                objects.setdefault(group, {})[name] = column.type
            elif not column.sql:
                known[group] = column.type
        return known | {group: f"STRUCT({_typed(names)})" for group, names in objects.items()}


def value(column: Column) -> str:
    """Return the SQL of a column's value in a line."""
    sql = column.sql or ".".join(map(quoted, (column.path or column.name).split(".", 1)))
    if column.type == NUMBER:  # an invalid file may contain NaN; null means not measured
        sql = f"CASE WHEN isfinite({sql}) THEN {sql} END"
    default = column.default or ("MAP {}" if column.type.startswith("MAP") else "")
    return f"coalesce({sql}, {default})" if default else sql


#: The first columns of each table of lines.
KEYS = (
    Column("folder", TEXT, "", "path of the run folder, as in the table `runs`", sql="folder"),
    Column("run_id", TEXT, "", "name of the run folder", sql="run_id"),
)


def quoted(name: str) -> str:
    """Return an identifier for SQL.

    >>> quoted("partition")
    '"partition"'
    """
    return '"' + name.replace('"', '""') + '"'


def declaration(columns: Iterable[Column]) -> str:
    """Return the columns of a table for ``CREATE TABLE``."""
    return _typed({one.name: one.type for one in columns})


def _typed(names: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in names.items())


def text(value: object) -> str:
    """Return a text for SQL.

    >>> text("Alice's runs")
    "'Alice''s runs'"
    """
    return "'" + str(value).replace("'", "''") + "'"


def file_to_read(path: object) -> str:
    """Return the path of a file as a text for SQL; DuckDB finds no glob in it."""
    return text("".join(f"[{letter}]" if letter in "[*?" else letter for letter in str(path)))


def read_json(file: str, fields: Mapping[str, str]) -> str:
    """Return a call of ``read_json`` for JSON Lines in a file, which is an SQL expression.

    An incomplete line is a row of nulls, and a value of a wrong type is null.
    """
    types = ", ".join(f"'{name}': '{kind}'" for name, kind in fields.items())
    return (
        f"read_json({file}, format='newline_delimited', ignore_errors=true, hive_partitioning=false, filename=true, "
        f"columns={{{types}}})"
    )


#: Columns with a value of run.json or summary.json, besides the metrics.
DOCUMENTED = (
    Column("run_id", TEXT, "", "name of the run folder"),
    Column("folder", TEXT, "", "path of the run folder, unique; the key of all tables"),
    Column("project", TEXT, "", "value of the tag `project`, else the account of the scheduler; null without both"),
    Column("user", TEXT, "", "login name"),
    Column("account", TEXT, "", "account of the scheduler's job"),
    Column("job_id", TEXT, "", "id of the scheduler's job"),
    Column("job_name", TEXT, "", "name of the scheduler's job"),
    Column("partition", TEXT, "", "partition or queue of the scheduler's job"),
    Column("tags", TEXT_BY_NAME, "", "tags by name; the value of a tag that is one word is an empty text"),
    Column("hosts", TEXTS, "", "all hosts, in alphabetical order"),
    Column("host_count", WHOLE, "hosts", "number of hosts"),
    Column("gpu_models", TEXTS, "", "models of the GPUs, in alphabetical order"),
    Column("device_keys", TEXTS, "", "UUIDs of the GPUs, in alphabetical order"),
    Column("drivers", TEXTS, "", "names and versions of the interfaces to the devices"),
    Column("gpu_power_limits_w", NUMBERS, "W", "different power limits of the GPUs at the start, ascending"),
    Column("gpu_power_profiles", TEXTS, "", "workload power profiles of the GPUs at the start; none: no profile"),
    Column("model", TEXT, "", "name of the trained model"),
    Column("git_commit", TEXT, "", "commit of the training code"),
    Column("git_dirty", BOOL, "", "whether the training code had changes after the commit"),
    Column("launcher", TEXT, "", "launcher of the job"),
    Column("world_size", WHOLE, "ranks", "number of ranks at the last start"),
    Column("started_time_s", NUMBER, "s (unix)", "first start"),
    Column("started_utc", TIME, "UTC", "the same time as `started_time_s`"),
    Column("ended_time_s", NUMBER, "s (unix)", "last end; null while the run continues, and after a kill"),
    Column(
        "status",
        TEXT,
        "",
        "completed, failed, interrupted, killed, stalled, ended or running; null without summary.json",
    ),
    Column("is_over", BOOL, "", "false: the run continues or is stalled, or its aggregator was killed"),
    Column("updated_time_s", NUMBER, "s (unix)", "time at which summary.json was written"),
    Column("simulated", BOOL, "", "whether no hardware was measured"),
    Column("attempts", WHOLE, "attempts", "number of starts"),
    Column("iterations", WHOLE, "iterations", "number of iterations"),
    Column("tokens", WHOLE, "tokens", "tokens without padding; null if none were counted, or a part is missing"),
    Column("samples", WHOLE, "samples", "samples; null if none were counted, or a part is missing"),
    Column("measured_tokens", WHOLE, "tokens", "counted tokens, also if a part is missing"),
    Column("measured_samples", WHOLE, "samples", "counted samples, also if a part is missing"),
    Column("measured_iterations_ratio", NUMBER, "ratio", "share of the iterations of all ranks that were counted"),
    Column("parameters", WHOLE, "parameters", "parameters of the whole model"),
    Column("parameters_kind", TEXT, "", "total, trainable or active"),
    Column("elapsed_s", NUMBER, "s", "wall time over all attempts"),
    Column("loss", NUMBER, "", "last loss; null if it was not finite or not recorded"),
    Column("losses_not_finite", WHOLE, "losses", "number of losses of all ranks that were NaN or infinite"),
    Column("first_not_finite", WHOLE, "", "number of the first iteration with such a loss"),
    Column("redone_iterations", WHOLE, "iterations", "iterations that a later attempt repeated; null if unknown"),
    Column("ranks_expected", WHOLE, "ranks", "ranks of the job"),
    Column("ranks_reporting", WHOLE, "ranks", "ranks with a report in the last window"),
    Column("gpus_expected", WHOLE, "GPUs", "GPUs of the job"),
    Column("gpus_measured", WHOLE, "GPUs", "GPUs with a measurement in the last window"),
    Column("reports_lost", WHOLE, "reports", "reports that never arrived"),
    Column("reports_late", WHOLE, "reports", "reports that arrived after their window had closed"),
    Column("energy_scope", TEXT, "", "scope of the energy: gpu, module, cpu or node-psu"),
    Column("energy_method", TEXT, "", "source of the energy: counter, instant power or average power"),
    Column("energy_estimated_joules", NUMBER, "J", "part of the total that was estimated, in gaps of the counter"),
    Column("energy_warmup_joules", NUMBER, "J", "part of the total in the warm-up"),
    Column("energy_gain_error", NUMBER, "ratio", "systematic error of the energy, half-width, 95 %"),
    Column("energy_time_coverage", NUMBER, "ratio", "measured share of the elapsed time, mean over devices"),
    Column("energy_iterations_coverage", NUMBER, "ratio", "measured share of the iterations, mean over devices"),
    Column("device_seconds", NUMBER, "s", "elapsed time, summed over GPUs (over ranks, if there are no GPUs)"),
    Column("waterfall_seconds", NUMBER_BY_NAME, "s", "device-seconds by part of the waterfall"),
    Column(
        "waterfall_joules", NUMBER_BY_NAME, "J", "energy by part of the waterfall; parts without energy are left out"
    ),
    Column("verdict_cause", TEXT, "", "the largest avoidable loss, or healthy or unknown: docs/verdict.md"),
    Column("verdict_text", TEXT, "", "the verdict as a sentence"),
    Column("verdict_next", TEXT, "", "the next action"),
    Column("verdict_bound", NUMBER, "ratio", "upper bound of the gain in throughput without this loss"),
    Column("goodput_seconds", NUMBER_BY_NAME, "s", "elapsed time by class of goodput, mean over the ranks"),
    Column("goodput_rank_seconds", NUMBER_BY_NAME, "s", "elapsed time by class of goodput, sum over the ranks"),
    Column("goodput_joules", NUMBER_BY_NAME, "J", "energy by class of goodput; classes without energy are left out"),
    Column("currency", TEXT, "", "currency of the costs; null if it is not set"),
    Column("events", WHOLE_BY_NAME, "events", "number of events by kind"),
    Column("not_measured", TEXTS, "", "sentences about quantities that were not measured"),
    Column("last_iterations", NUMBER_BY_NAME, "iterations", "number of iterations in which a rank was last, by rank"),
    Column("iterations_compared", NUMBER, "iterations", "number of iterations in which own times were compared"),
    Column("stragglers", JSON, "", "`stragglers` of summary.json"),
    Column("instruments", JSON, "", "`instruments` of summary.json: values of instruments by name"),
    Column("packages", TEXT_BY_NAME, "", "versions of Python packages by name"),
    Column("config", JSON, "", "settings of effllm"),
    Column("facts", JSON, "", "the other fields of run.json, with the facts of the training script"),
)


_BASES = {"window": "this window", "run": "run to date", "job": "whole wall time"}


def metric_columns(*, in_windows: bool = False) -> dict[str, Column]:
    """Return the column of each metric of a summary or of a window, by tag.

    The name of a column is the tag with ``_`` for ``/``.
    """
    return {
        tag: Column(
            column_of(tag),
            NUMBER,
            entry.unit,
            f"{' '.join(entry.help.split())} Base: {_BASES[base]}{' so far' * (in_windows and base == 'job')}.",
            f"values.{tag}" if in_windows else "",
        )
        for entry in METRICS.values()
        if entry.in_windows or not in_windows
        for base in (entry.bases if in_windows else entry.run_bases)
        for tag in [entry.tag(base)]
    }


def column_of(tag: str) -> str:
    """Return the name of a metric's column.

    >>> column_of("run_energy/joules_per_token")
    'run_energy_joules_per_token'
    """
    return tag.replace("/", "_")


_AROUND_METRICS = (
    Column("metric_errors", NUMBER_BY_NAME, "of the metric", "random error by column of a metric: half-width, 95 %"),
    Column("metric_sensor_errors", NUMBER_BY_NAME, "of the metric", "systematic error by column: half-width, 95 %"),
    Column("other_metrics", NUMBER_BY_NAME, "", "by tag: metrics that this version of effllm does not have"),
    Column("schema_version", WHOLE, "", "version of the files of the run"),
)


def run_columns() -> tuple[Column, ...]:
    return (*DOCUMENTED, *metric_columns().values(), *_AROUND_METRICS)
