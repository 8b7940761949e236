"""Prometheus: a page with the newest values of the job and its totals, by default only on loopback.

A value that is no longer measured is not served, because alerts must not use old values.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from effllm import metrics
from effllm.config.setting_values import FOLDER, INTERFACE, SECRET_FILE, ValueType, whole
from effllm.metrics.output_names import base_unit_name
from effllm.records.events import KINDS
from effllm.records.identity import Identity
from effllm.records.job import SPREADS, ClusterReport
from effllm.records.rank import Event
from effllm.sinks import JOB_VALUES, Option, RunInfo, job_values
from effllm.sinks.prometheus.target_file import TargetFile, instance_name
from effllm.sinks.prometheus.web_server import Access, listen, read_access
from effllm.store.own_files import user_name

OPTIONS = {
    "port": Option(
        "9788", whole(0, 65535, "a port"), "Port of the metrics page. 0: any free port, as if the port is in use."
    ),
    "interface": Option(
        "127.0.0.1", INTERFACE, "Interface of the page. The page leaves loopback only with TLS and a token."
    ),
    "tls_cert": Option("", ValueType(str, "a PEM file"), "Certificate of the page, with its chain."),
    "tls_key": Option("", SECRET_FILE, "Private key of the certificate."),
    "token_file": Option("", SECRET_FILE, "File with the token that each request must have."),
    "discovery_dir": Option(
        "", FOLDER, "Folder for Prometheus's file_sd_configs, in which the job writes a file with its address."
    ),
}

POLL_S = 0.1
PREFIX = "efficientllm"
BASE_LABEL = "over"  # label for the base of a value: run, window or job
#: A report is shown for FRESH_WINDOWS times the duration of its window, or for FRESH_S if that is longer.
FRESH_WINDOWS = 3.0
FRESH_S = 60.0
QUANTILE_LABEL = "quantile"  # label for a part of a `Spread`
#: Fields of a `Spread` over ranks or GPUs: name -> value of the label.
QUANTILES = {"least": "0", "p5": "0.05", "median": "0.5", "p95": "0.95", "most": "1"}
#: Metrics without a chart that operators need: money, and stragglers with their cost.
SERVED_TOO = ("electricity_cost", "gpu_cost", "named_ranks", "waiting_gpu_seconds")
MAX_LABEL_LETTERS = 1000
#: Kinds of events that have an alert.
ALERTED = ("xid", "ecc", "aggregator", "rejected")
MAX_KINDS = len(KINDS) + 10  # maximum number of event kinds, because ranks may send unknown kinds
Samples = Sequence[tuple[dict[str, str], float]]
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def open_sink(run: RunInfo) -> Prometheus:
    """Start to serve the metrics of this run.

    Raises:
        SinkUnavailable: the page cannot be served with these options.
    """
    access = read_access(run.options)
    page = MetricsPage(run.identity, time.monotonic, run.config.runbook_url)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(page)
    port = run.options["port"]
    server = listen(access, port, make_wsgi_app(registry))
    address = f"{access.scheme}://{access.target(server.server_port)}/metrics"
    if server.server_port != port:
        in_use = f"port {port} is in use: " if port else ""
        run.log(f"{in_use}metrics for Prometheus are at {address}")
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="sink-prometheus-http", daemon=True)
    thread.start()
    return Prometheus(page, server, thread, _write_target_file(run, access, server.server_port))


def _write_target_file(run: RunInfo, access: Access, port: int) -> TargetFile | None:
    """Write the file of the job in the discovery folder; without the file the page is served all the same."""
    if not (folder := run.options["discovery_dir"]):
        return None
    instance = instance_name(user_name(), run.identity().run_id or "", run.folder)
    try:
        return TargetFile(Path(folder), instance, access.target(port), {"__scheme__": access.scheme})
    except OSError as error:
        run.log(
            f"Prometheus cannot discover this job: prometheus:discovery_dir={folder}: {error.strerror or error}; "
            f"metrics are at {access.scheme}://{access.target(port)}/metrics"
        )
        return None


class Prometheus:
    """Serves the newest report."""

    def __init__(self, page: MetricsPage, server: Any, thread: threading.Thread, target: TargetFile | None) -> None:
        self._page, self._server, self._thread, self._target = page, server, thread, target
        self.port: int = server.server_port

    def write(self, report: ClusterReport) -> None:
        self._page.set_report(report)

    def event(self, event: Event) -> None:
        """Count the events that a line represents."""
        self._page.count_events(event.kind, event.count)

    def close(self) -> None:
        """Stop the server. Prometheus then marks the values as stale."""
        if self._target is not None:
            self._target.close()  # first, so that the end of a job is not an unreachable target
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(1.0)


class MetricsPage(Collector):
    """The served values, which the sink's thread writes and the server's threads read.

    ``clock`` returns a monotonic time in seconds; ``runbook_url`` is the page with the steps for alerts.
    """

    def __init__(self, identity: Callable[[], Identity], clock: Callable[[], float], runbook_url: str = "") -> None:
        self._identity, self._runbook_url = identity, runbook_url
        self._clock, self._labels = clock, {"run_id": identity().run_id or ""}  # labels of all samples
        self._lock = threading.Lock()
        self._report: ClusterReport | None = None
        self._received_s = 0.0  # time of the report on the clock
        self._is_stalled = False
        self._num_events = dict.fromkeys(ALERTED, 0)  # by kind; 0 first, so that increase() includes the first event

    def set_report(self, report: ClusterReport) -> None:
        with self._lock:
            self._report, self._received_s = report, self._clock()

    def count_events(self, kind: str, count: int) -> None:
        with self._lock:
            kind = kind if kind in self._num_events or len(self._num_events) < MAX_KINDS else "other"
            self._num_events[kind] = self._num_events.get(kind, 0) + count
            if kind in ("stalled", "resumed"):
                self._is_stalled = kind == "stalled"

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            report, age_s, events = self._report, self._clock() - self._received_s, dict(self._num_events)
            is_stalled = self._is_stalled
        is_fresh = report is not None and age_s <= max(FRESH_WINDOWS * report.last.loop.time_s, FRESH_S)
        yield self._metric("fresh", "1: the newest report of the job is new enough to be shown.", is_fresh)
        yield self._metric("stalled", "1: the ranks, or some of them, make no progress (event stalled).", is_stalled)
        event_samples = [({"kind": kind}, float(count)) for kind, count in sorted(events.items())]
        info = _identity_labels(self._identity()) | ({"runbook_url": self._runbook_url} if self._runbook_url else {})
        text = "Number of events by kind; their texts are in events.jsonl."
        yield self._metric("events", text, event_samples, CounterMetricFamily)
        yield self._metric("run_info", "1: the labels are the identity of the run.", [(info, 1.0)])
        if report is None:
            return
        yield self._metric("report_age_seconds", "Time since the receipt of the newest report.", age_s)
        for name, value in job_values(report).items():
            entry = JOB_VALUES[name]
            if is_fresh or entry.lasting:
                kind = CounterMetricFamily if entry.lasting == "total" else GaugeMetricFamily
                yield self._metric(name, entry.text, value, kind)
        by_class = [({"class": name}, seconds) for name, seconds in report.gpu_seconds.items()]
        yield self._metric("gpu_seconds", "GPU-seconds of all attempts by class; their sum is the total.", by_class)
        if is_fresh:
            yield from self._metrics_and_spreads(report)

    def _metrics_and_spreads(self, report: ClusterReport) -> Iterator[Metric]:
        for entry in metrics.METRICS.values():
            name, factor = base_unit_name(entry)
            values = [(base, report.values.get(entry.tag(base))) for base in entry.bases]
            samples = [({BASE_LABEL: base}, value * factor) for base, value in values if value is not None]
            if (entry.chart or entry.name in SERVED_TOO) and any(math.isfinite(value) for _, value in samples):
                yield self._metric(name, entry.help, [sample for sample in samples if math.isfinite(sample[1])])
        for name, spread in report.spread.items():
            samples = [({QUANTILE_LABEL: text}, float(getattr(spread, part))) for part, text in QUANTILES.items()]
            yield self._metric(name, f"Distribution; 0 is the smallest value, 1 the largest: {SPREADS[name]}.", samples)

    def _metric(self, name: str, text: str, samples: Samples | float, kind: Family = GaugeMetricFamily) -> Metric:
        """Return a metric; its samples have the same labels, and a number is a sample without further labels."""
        rows = [({}, float(samples))] if isinstance(samples, (int, float)) else samples
        family = kind(f"{PREFIX}_{name}", text, labels=[*self._labels, *(rows[0][0] if rows else ())])
        for labels, value in rows:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family


def _identity_labels(identity: Identity) -> dict[str, str]:
    """Return the labels of the info series; an unknown value is empty, and a long one is cut."""
    tags = dict(tag.partition("=")[::2] for tag in identity.tags)
    # The page ends before the run, so its identity has no end.
    facts = {name: value for name, value in asdict(identity).items() if name not in ("run_id", "ended_time_s")}
    facts["project"] = tags.get("project") or identity.account  # as in effllm runs
    texts = {name: ",".join(value) if isinstance(value, tuple) else value for name, value in facts.items()}
    return {name: "" if value is None else str(value)[:MAX_LABEL_LETTERS] for name, value in texts.items()}
