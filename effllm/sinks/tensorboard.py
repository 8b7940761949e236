"""TensorBoard: one event file, written by TensorBoard's record writer, without torch and TensorFlow.

TensorBoard's ``EventFileWriter`` is not used, because its thread ends when the disk is full, and readers stop at an
incomplete record.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from effllm import metrics
from effllm.config.setting_values import FOLDER
from effllm.metrics import contract_metrics, metric_of_tag
from effllm.metrics.output_names import AT_A_GLANCE, chart_tag, has_chart
from effllm.records.job import STEP_SECONDS, UTILIZATION_RATIO, ClusterReport
from effllm.sinks import JOB_VALUES, Option, RunInfo, SinkUnavailable, job_values
from effllm.store import regular_file

OPTIONS = {
    "dir": Option(
        "",
        FOLDER,
        "Folder in which each run has a folder with its event file; its name must not contain a comma. "
        "The default is efficientllm/ in the framework's folder, or the run folder.",
    ),
}

SUFFIX = "efficientllm"

#: Values in addition to the metrics: tag -> (unit, help).
OTHER_VALUES: dict[str, tuple[str, str]] = {
    **{entry.tensorboard[0]: (entry.tensorboard[1], entry.text) for entry in JOB_VALUES.values() if entry.tensorboard},
    "training/loss": ("", "Loss of the window."),
    "straggler/p50_step_seconds": ("s/iteration", "Median over ranks of the mean step time in the window."),
    "straggler/p95_step_seconds": ("s/iteration", "95th percentile over ranks of the mean step time in the window."),
    "health/p5_utilization_ratio": ("ratio", "5th percentile over GPUs of the utilization in the window."),
}

_BASES = {"run": "Run to date", "window": "The last window", "job": "The whole wall time"}


def open_sink(run: RunInfo) -> TensorBoard:
    """Open a new event file.

    Raises:
        SinkUnavailable: no folder for the event file, or a folder that cannot be written.
    """
    if run.tensorboard_dir is None:
        raise SinkUnavailable(
            "there is no folder for TensorBoard's event file; set tensorboard:dir=FOLDER in EFFICIENTLLM_SINKS"
        )
    try:
        is_private = run.folder in (run.tensorboard_dir, *run.tensorboard_dir.parents)
        return TensorBoard(_EventFile(run.tensorboard_dir, is_private))
    except OSError as error:
        reason = error.strerror or error
        raise SinkUnavailable(
            f"no event file can be created in {run.tensorboard_dir}: {reason}; "
            "set tensorboard:dir=FOLDER in EFFICIENTLLM_SINKS to another folder"
        ) from error


class TensorBoard:
    """Writes each report at once: a killed job must have all points on disk."""

    def __init__(self, file: _EventFile) -> None:
        self._file = file
        self._records = RecordWriter(file)
        self._described_tags: set[str] = set()  # tags whose name and help are in the file
        self._last_step: int | None = None  # of the last points
        self._write_event(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, report: ClusterReport) -> None:
        if not report.values:
            return
        shown = {tag: value for tag, value in report.values.items() if has_chart(tag)}
        values = {tag: value for tag, value in {**shown, **_other_values(report)}.items() if math.isfinite(value)}
        step = report.iteration
        if self._last_step is None:
            # With this mark, TensorBoard drops points of the previous attempt at this and later steps.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write_event(event_pb2.Event(wall_time=report.time_s, step=step, session_log=start))
        elif report.correction:
            # At a step before the last step, TensorBoard would drop all later points.
            step = max(step, self._last_step)
            values = {tag: value for tag, value in values.items() if _is_cumulative(tag)}
        new = {tag: value for tag, value in values.items() if tag not in self._described_tags}
        if new:
            # TensorBoard reads a tag's name and help only from tensors, but most scripts read only plain values. So the
            # first point of each tag is written as a tensor and as a plain value.
            described = [_described_value(tag, value, simulated=report.simulated) for tag, value in new.items()]
            self._add_summary(report.time_s, step, [*described, _layout_value(self._described_tags | new.keys())])
            self._described_tags |= new.keys()
        plain = [summary_pb2.Summary.Value(tag=chart_tag(tag), simple_value=value) for tag, value in values.items()]
        self._add_summary(report.time_s, step, plain)
        self._last_step = step

    def close(self) -> None:
        self._file.close()

    def _add_summary(self, time_s: float, step: int, values: list[summary_pb2.Summary.Value]) -> None:
        self._write_event(event_pb2.Event(wall_time=time_s, step=step, summary=summary_pb2.Summary(value=values)))

    def _write_event(self, event: event_pb2.Event) -> None:
        self._records.write(event.SerializeToString())


class _EventFile:
    """An event file with complete records only; an incomplete record on a full disk is removed."""

    def __init__(self, folder: Path, is_private: bool) -> None:
        for parent in reversed([folder, *folder.parents]):
            if parent == folder or not parent.exists():
                parent.mkdir(mode=0o700 if is_private else 0o755, exist_ok=True)
        second, nanosecond = divmod(time.time_ns(), 10**9)
        # TensorBoard reads files in the order of their names, and two attempts may start in the same second.
        name = f"events.out.tfevents.{second:010d}.{nanosecond:09d}.{socket.gethostname()}.{os.getpid()}.{SUFFIX}"
        # In a framework's folder, the event file has the permissions of the framework's files.
        mode = 0o600 if is_private else 0o644
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(folder / name, flags, mode)
        self._is_closed = False

    def write(self, record: bytes) -> None:
        regular_file.append(self._descriptor, record)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self._descriptor)


def _other_values(report: ClusterReport) -> dict[str, float]:
    values = {tag[0]: value for name, value in job_values(report).items() if (tag := JOB_VALUES[name].tensorboard)}
    if report.loss is not None:
        values["training/loss"] = report.loss
    if not report.simulated:
        del values["health/simulated"]
    if (steps := report.spread.get(STEP_SECONDS)) is not None:
        values |= {"straggler/p50_step_seconds": steps.median, "straggler/p95_step_seconds": steps.p95}
    if (busy := report.spread.get(UTILIZATION_RATIO)) is not None:
        values["health/p5_utilization_ratio"] = busy.p5
    return values


def _unit_and_help(tag: str) -> tuple[str, str]:
    """Return unit and help of a tag; empty for an unknown tag."""
    entry = metric_of_tag(tag)
    if entry is None:
        return OTHER_VALUES.get(tag, ("", ""))
    return entry.unit, f"{_BASES[_base_of(tag)]}. {entry.help}"


def _base_of(tag: str) -> str:
    """Return the base of a metric's tag (run, window or job); empty for other values."""
    entry = metric_of_tag(tag)
    return "" if entry is None else next((base for base in entry.bases if entry.tag(base) == tag), entry.bases[0])


def _is_cumulative(tag: str) -> bool:
    """Whether a tag is a total of the run or the job; late reports correct its newest point."""
    if tag in OTHER_VALUES:
        return tag in ("health/reports_lost", "health/reports_late", "health/simulated")
    entry = metric_of_tag(tag)
    return entry is not None and tag in {entry.tag(base) for base in entry.bases if base != "window"}


def _described_value(tag: str, value: float, *, simulated: bool) -> summary_pb2.Summary.Value:
    unit, text = _unit_and_help(tag)
    words = [word for word in (unit, _base_of(tag)) if word]
    name = f"{chart_tag(tag)} ({', '.join(words)})" if words else chart_tag(tag)
    metadata = scalar_metadata.create_summary_metadata(name, ("**Simulated.** " if simulated else "") + text)
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[value])
    return summary_pb2.Summary.Value(tag=chart_tag(tag), tensor=tensor, metadata=metadata)


def _layout_value(tags: set[str]) -> summary_pb2.Summary.Value:
    """Return the page of the Custom Scalars tab with these tags, as a summary value."""
    categories = [layout_pb2.Category(title=title, chart=charts) for title, charts in _categories(tags)]
    page = layout_pb2.Layout(category=categories).SerializeToString()
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[page])
    return summary_pb2.Summary.Value(
        tag=layout_metadata.CONFIG_SUMMARY_TAG, tensor=tensor, metadata=layout_metadata.create_summary_metadata()
    )


def _categories(tags: set[str]) -> Iterator[tuple[str, list[layout_pb2.Chart]]]:
    """Yield titles and charts; TensorBoard merges the charts of several runs only if they are identical."""
    at_a_glance = {f"{name} ({_unit_and_help(tag)[0]})": [tag] for tag, name in AT_A_GLANCE.items()}
    if shown := _charts(at_a_glance, tags):
        yield "at a glance", shown
    contract = {f"{entry.name} ({entry.unit})": [entry.tag("run")] for entry in contract_metrics()}
    if shown := _charts(contract, tags):
        yield "efficiency: run to date", shown
    groups: dict[str, dict[str, list[str]]] = {}
    units = {entry.tag(entry.bases[0]): entry.unit for entry in metrics.METRICS.values() if entry.group}
    units |= {tag: unit for tag, (unit, _) in OTHER_VALUES.items()}
    for tag, unit in units.items():
        if tag in AT_A_GLANCE:
            continue
        group, _, name = tag.partition("/")
        # Values of one unit share a chart, except rates, which differ by orders of magnitude.
        title = f"{name} ({unit})" if "/" in unit else f"{group} ({unit})"
        groups.setdefault(group, {}).setdefault(title, []).append(tag)
    for group, charts in groups.items():
        if shown := _charts(charts, tags):
            yield group, shown


def _charts(charts: dict[str, list[str]], tags: set[str]) -> list[layout_pb2.Chart]:
    """Return the charts (title -> tags) with at least one tag that has values."""
    return [
        layout_pb2.Chart(
            title=title,
            multiline=layout_pb2.MultilineChartContent(tag=[f"{re.escape(chart_tag(tag))}$" for tag in of_chart]),
        )
        for title, of_chart in charts.items()
        if tags.intersection(of_chart)
    ]
