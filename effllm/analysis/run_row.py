"""The row of a run in the table `runs`, from run.json and summary.json.

A value of a wrong type becomes null in the table.  A file that is missing or cannot be decoded leaves its columns null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from effllm.analysis.column import BOOL, DOCUMENTED, NUMBER, NUMBER_BY_NAME, TEXT, WHOLE, metric_columns
from effllm.records.facts import bool_or_none, float_or_none, int_or_none, object_or_none, text_or_none
from effllm.records.job import SCHEMA_VERSION, version_error
from effllm.records.rank import MAX_COUNT
from effllm.store.reader import DECODE_ERRORS
from effllm.store.regular_file import read_regular

Document = dict[str, Any]
Form = TypeVar("Form")
#: A file of effllm has these numbers between 0 and `MAX_COUNT`; another impossible value is null in the table.
_LIMITED = ("world_size", "iterations", "attempts", "elapsed_s")


class Unreadable(Exception):
    """A file of a run cannot be read; the message is the reason."""


def read_document(path: Path) -> Document | None:
    """Return a JSON object from a regular file; ``None`` if there is no such file."""
    try:
        document = msgspec.json.decode(read_regular(path), type=Document)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    except DECODE_ERRORS as error:
        raise Unreadable(f"not a JSON object: {error}") from error
    if problem := version_error(document.get("schema_version", SCHEMA_VERSION)):
        raise Unreadable(problem)
    for name in _LIMITED:
        if isinstance(value := document.get(name), int | float) and not 0 <= value <= MAX_COUNT:
            raise Unreadable(f"{name} cannot be {value:g}")
    return document


def read_record(path: Path, form: type[Form]) -> Form | None:
    """Return a JSON object from a regular file in a form; ``None`` if there is no such file."""
    document = read_document(path)
    try:
        return None if document is None else msgspec.convert(document, form, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Unreadable(f"it has another form: {error}") from error


def run_row(folder: Path, run: Document, summary: Document) -> Document:
    """Return the row of a run by column; columns without a value may be missing."""
    tags = _tags(summary.get("tags") or run.get("tags"))
    merged = {**run, **summary}
    started_s = float_or_none(summary.get("started_time_s")) or float_or_none(run.get("started_time_s"))
    row: Document = {item.name: _at(summary, item.path) if item.path else merged.get(item.name) for item in DOCUMENTED}
    row |= {
        "run_id": run.get("run_id") or summary.get("run_id") or folder.name,
        "folder": str(folder),
        "tags": tags,
        "project": tags.get("project") or merged.get("account"),
        "started_time_s": started_s,
        "started_utc": utc(started_s),
        "git_dirty": run.get("git_dirty"),
        "packages": _object(run.get("packages")),
        "config": run.get("config"),
        "facts": {name: value for name, value in run.items() if name not in _HAVE_COLUMNS},
        "schema_version": merged.get("schema_version"),
    }
    row |= _hosts_and_gpus(run, merged) | _waterfall_and_goodput(summary)
    # DuckDB would cast a text such as "nan" to a number.
    for name, check in _CHECKS:
        row[name] = check(row[name])
    return row | _metric_values(summary)


_HAVE_COLUMNS = frozenset((*(column.name for column in DOCUMENTED), "ranks", "gpu_model_count", "schema_version"))


def _object(value: Any) -> Document:
    return object_or_none(value) or {}


_READERS: dict[str, Callable[[Any], Any]] = {
    TEXT: text_or_none, WHOLE: int_or_none, NUMBER: float_or_none, BOOL: bool_or_none, NUMBER_BY_NAME: _object,
}  # fmt: skip
_CHECKS = [(column.name, _READERS[column.type]) for column in DOCUMENTED if column.type in _READERS]


def _objects(value: Any) -> list[Document]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _at(document: Document, path: str) -> Any:
    """Return the value at a path such as ``energy.scope``."""
    group, _, name = path.partition(".")
    return _object(document.get(group)).get(name)


def utc(time_s: float | None) -> str | None:
    """Return a unix time as text for DuckDB; ``None`` for a time outside the calendar."""
    if time_s is None:
        return None
    try:
        return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")
    except (OverflowError, ValueError, OSError):
        return None


def _tags(tags: Any) -> dict[str, str]:
    pairs = (tag.partition("=") for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else ()
    return {name: value for name, _, value in pairs}


def _hosts_and_gpus(run: Document, merged: Document) -> Document:
    """Return the facts of hosts and GPUs; the identity names only the first hosts and models."""
    ranks = [_object(about) for about in _object(run.get("ranks")).values()]
    devices = [device for about in ranks for device in _objects(about.get("devices"))]
    gpus = [device for device in devices if device.get("is_gpu") is True]
    hosts = _distinct_texts(about.get("host") for about in ranks)
    limits = {number for gpu in gpus if (number := float_or_none(gpu.get("power_limit_w"))) is not None}
    return {
        "hosts": hosts or merged.get("hosts"),
        "host_count": len(hosts) or merged.get("host_count"),
        "gpu_models": _distinct_texts(gpu.get("name") for gpu in gpus) or merged.get("gpu_models"),
        "device_keys": _distinct_texts(gpu.get("key") for gpu in gpus),
        "drivers": _distinct_texts(device.get("driver") for device in devices),
        "gpu_power_limits_w": sorted(limits),
        "gpu_power_profiles": _distinct_texts(gpu.get("power_profiles") for gpu in gpus),
    }


def _distinct_texts(values: Iterator[Any]) -> list[str]:
    return sorted({value for value in values if isinstance(value, str) and value})


_COLUMN_BY_TAG = {tag: column.name for tag, column in metric_columns().items()}


def _metric_values(summary: Document) -> Document:
    columns = _COLUMN_BY_TAG
    row: Document = {"metric_errors": {}, "metric_sensor_errors": {}, "other_metrics": {}}
    for tag, stated in _object(summary.get("metrics")).items():
        entry = _object(stated)
        value = float_or_none(entry.get("value"))
        if tag not in columns:
            row["other_metrics"][tag] = value
            continue
        row[columns[tag]] = value
        for name, field in (("metric_errors", "error"), ("metric_sensor_errors", "sensor_error")):
            if (error := float_or_none(entry.get(field))) is not None:
                row[name][columns[tag]] = error
    return row


def _waterfall_and_goodput(summary: Document) -> Document:
    parts = _objects(_at(summary, "waterfall.parts"))
    named = [(part["name"], part) for part in parts if isinstance(part.get("name"), str)]
    return {
        "waterfall_seconds": {name: part.get("device_seconds") for name, part in named},
        "waterfall_joules": {name: part["joules"] for name, part in named if part.get("joules") is not None},
        "goodput_joules": {name: j for name, j in _object(_at(summary, "goodput.joules")).items() if j is not None},
    }
