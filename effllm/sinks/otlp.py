"""OTLP: the newest values of the job and of its devices, sent to an OpenTelemetry collector over HTTP.

Hardware has the names of OpenTelemetry's semantic conventions (`hw.*`, in development), training has `effllm.*`. The
points are made here, with the times of the windows, so only the exporter of OpenTelemetry's SDK is used: no meter and
no thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import HOST_NAME, SERVICE_NAME, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from effllm import __version__, metrics
from effllm.config.setting_values import matching, number
from effllm.metrics.output_names import base_unit_name, unit_of
from effllm.records.device_state import CPU_KIND, GPU_KIND, MODULE_KIND, NODE_KIND, DeviceState
from effllm.records.job import ClusterReport
from effllm.sinks import JOB_VALUES, FirstFailure, Option, RunInfo, job_values

OPTIONS = {
    "endpoint": Option(
        "",
        matching(r"(https?://\S+)?", "a URL that begins with http:// or https://"),
        "URL that receives metrics, such as http://localhost:4318/v1/metrics. "
        "The default is that of the variables OTEL_EXPORTER_OTLP_*.",
    ),
    "every": Option("10", number(0, unit="seconds"), "Minimum time between two exports, in seconds."),
}

COUNTER, GAUGE = "counter", "gauge"
BASE_ATTRIBUTE = "effllm.over"  # attribute for the base of a value: run, window or job
NS = 10**9
#: Kind of a device -> value of `hw.type`. The conventions have no type for a module of GPU, CPU and memory.
HW_TYPES = {GPU_KIND: "gpu", CPU_KIND: "cpu", MODULE_KIND: "enclosure"}
SCOPE = InstrumentationScope("effllm", __version__)


class Instrument(NamedTuple):
    """Kind, unit and description of a metric."""

    kind: str
    unit: str
    text: str


#: The metrics of hardware, as in OpenTelemetry's model/hardware/*.yaml.
DEVICE_INSTRUMENTS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, Instrument])

JOB_INSTRUMENTS = {row.otlp[0]: Instrument(*row.otlp[1:], row.text) for row in JOB_VALUES.values() if row.otlp}

#: A metric's name, the attributes of a value, and the value.
Value = tuple[str, Mapping[str, str], float]


def open_sink(run: RunInfo) -> Otlp:
    """Open an exporter with the standard variables OTEL_EXPORTER_OTLP_*; nothing is sent before the first report."""
    return Otlp(run)


class Otlp:
    """Sends the newest report at most every ``every`` seconds, and at the end the last report."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._last_error = _LastError()
        self._exporter = OTLPMetricExporter(endpoint=run.options["endpoint"] or None)
        self._resource = _resource(run.identity().run_id or "")
        self._sent_j: dict[str, float] = {}  # energy by device: a late report must not lower a counter
        self._unsent: ClusterReport | None = None
        self._sent_time_s = -math.inf  # unix time of the report that was sent last
        self._first_failure = FirstFailure()

    def write(self, report: ClusterReport) -> None:
        """Send a report, or keep it until the next export is due.

        Raises:
            WriteFailed: the values were not received.
        """
        self._unsent = report
        if report.final or abs(report.time_s - self._sent_time_s) >= self._run.options["every"]:
            self._send(report)

    def close(self) -> None:
        """Send the last report, and close the connection. May be called twice."""
        if self._unsent is not None:
            self._send(self._unsent)
        self._exporter.shutdown()

    def _send(self, report: ClusterReport) -> None:
        self._unsent, self._sent_time_s = None, report.time_s  # after a failure this report is not sent again
        end_ns = int(report.time_s * NS)
        start_ns = min(int((self._run.identity().started_time_s or report.time_s) * NS), end_ns)
        by_host: dict[str, list[DeviceState]] = {}
        for device in self._run.devices.newest:
            by_host.setdefault(device.host, []).append(device)
        job_instruments = {**JOB_INSTRUMENTS, **_METRIC_INSTRUMENTS}
        groups = [(self._resource, _metrics(job_instruments, _values_of_job(report), start_ns, end_ns))]
        for host, devices in sorted(by_host.items()):
            resource = self._resource.merge(Resource({HOST_NAME: host} if host else {}))
            groups.append((resource, _metrics(DEVICE_INSTRUMENTS, self._values_of_devices(devices), start_ns, end_ns)))
        scopes = [(resource, [ScopeMetrics(SCOPE, made, "")]) for resource, made in groups if made]
        data = MetricsData([ResourceMetrics(resource, scope, "") for resource, scope in scopes])
        if self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise self._first_failure.error_of(self._last_error.take_text())
        self._first_failure.note_success()

    def _values_of_devices(self, devices: Sequence[DeviceState]) -> Iterator[Value]:
        for device in devices:
            attributes = _attributes(device)
            if device.joules is not None:
                joules = self._sent_j[device.key] = max(device.joules, self._sent_j.get(device.key, 0.0))
                # Energy of a whole host has its own metric, so that a sum over hw.energy counts no joule twice.
                yield ("hw.host.energy" if device.kind == NODE_KIND else "hw.energy"), attributes, joules
            if device.power_w is not None:
                yield ("hw.host.power" if device.kind == NODE_KIND else "hw.power"), attributes, device.power_w
            if device.kind == GPU_KIND:
                yield from _values_of_gpu(device, attributes)


def _values_of_gpu(device: DeviceState, attributes: Mapping[str, str]) -> Iterator[Value]:
    without_type = {name: text for name, text in attributes.items() if name != "hw.type"}
    model = {"hw.model": device.name, "hw.driver_version": device.driver}
    gpu = {**without_type, **{name: text for name, text in model.items() if text}}
    if device.utilization is not None:
        yield "hw.gpu.utilization", {**gpu, "hw.gpu.task": "general"}, device.utilization
    if device.memory_bytes is not None:
        yield "hw.gpu.memory.usage", gpu, int(device.memory_bytes)
        if device.memory_total_bytes:
            yield "hw.gpu.memory.utilization", gpu, device.memory_bytes / device.memory_total_bytes
    if device.memory_total_bytes is not None:
        yield "hw.gpu.memory.limit", gpu, device.memory_total_bytes
    if device.temperature_c is not None:
        sensor = {"hw.id": f"{device.key}/temperature", "hw.parent": device.key, "hw.sensor_location": "gpu"}
        yield "hw.temperature", sensor, device.temperature_c


def _attributes(device: DeviceState) -> dict[str, str]:
    named = {"hw.id": device.key} | ({"hw.name": device.name} if device.name else {})
    return named if device.kind == NODE_KIND else {**named, "hw.type": HW_TYPES[device.kind]}


def _values_of_job(report: ClusterReport) -> Iterator[Value]:
    yield from ((otlp[0], {}, value) for name, value in job_values(report).items() if (otlp := JOB_VALUES[name].otlp))
    for entry in metrics.METRICS.values():
        name, factor = _name_and_factor(entry)
        for base in entry.bases if name in _METRIC_INSTRUMENTS else ():
            if (value := report.values.get(entry.tag(base))) is not None:
                yield name, {BASE_ATTRIBUTE: base}, value * factor


def _name_and_factor(entry: metrics.Metric) -> tuple[str, float]:
    """Return the name of a metric, ``effllm.GROUP.NAME``, and the factor of its values."""
    name, factor = base_unit_name(entry)
    short_name = name.removeprefix(f"{entry.group}_") if entry.group else name
    return ".".join(part for part in ("effllm", entry.group, short_name) if part), factor


_METRIC_INSTRUMENTS = {
    _name_and_factor(entry)[0]: Instrument(GAUGE, unit_of(entry).ucum, entry.help)
    for entry in metrics.METRICS.values()
    if entry.chart
}


def _metrics(instruments: dict[str, Instrument], values: Iterator[Value], start_ns: int, end_ns: int) -> list[Metric]:
    points_of: dict[str, list[NumberDataPoint]] = {}
    for name, attributes, value in values:
        if math.isfinite(value):
            since_ns = 0 if instruments[name].kind == GAUGE else start_ns  # only sums have a start
            points_of.setdefault(name, []).append(NumberDataPoint(attributes, since_ns, end_ns, value, []))
    made = []
    for name, points in points_of.items():
        kind, unit, text = instruments[name]
        total = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=kind == COUNTER)
        made.append(Metric(name, text, unit, Gauge(points) if kind == GAUGE else total))
    return made


def _resource(run_id: str) -> Resource:
    """Return the resource of the run, with the attributes in OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME."""
    resource = Resource.create({"effllm.run.id": run_id})
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "effllm"}))
    return resource


class _LastError(logging.Handler):
    """Keeps the last message of OpenTelemetry's exporter instead of printing it, because stderr belongs to the job."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._text = record.getMessage()

    def take_text(self) -> str:
        text, self._text = self._text, ""
        return text or "the receiver did not accept the values"
