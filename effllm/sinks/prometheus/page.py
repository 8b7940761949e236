"""The content of the metrics page: gauges with the newest values of the job, and counters with its totals."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import asdict
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from effllm import metrics
from effllm.metrics.output_names import name_of
from effllm.records.events import KINDS
from effllm.records.identity import Identity
from effllm.records.job import SPREADS, ClusterReport
from effllm.sinks import JOB_VALUES, job_values

PREFIX = "efficientllm"
BASE = "over"  # label for the base of a value: run, window or job

#: A report is shown for FRESH_WINDOWS times the duration of its window, or for FRESH_S if that is longer.
FRESH_WINDOWS = 3.0
FRESH_S = 60.0
QUANTILE = "quantile"  # label for a part of a `Spread`
#: Fields of a `Spread` over ranks or GPUs: name -> value of the label.
PARTS = {"least": "0", "p5": "0.05", "median": "0.5", "p95": "0.95", "most": "1"}
#: Metrics without a chart that operators need: money, and stragglers with their cost.
SERVED_TOO = ("electricity_cost", "gpu_cost", "named_ranks", "waiting_gpu_seconds")
#: Values of the job that stay true without a new report: totals, which are counters, and other facts.
TOTALS = (
    "iterations", "tokens", "samples", "generated_tokens", "losses_not_finite", "energy_measured_joules",
    "reports_lost", "reports_late",
)  # fmt: skip
LASTING = ("ranks_expected", "gpus_expected", "simulated", "elapsed_seconds", "gpus_unused")
MAX_LABEL_LETTERS = 1000
#: Kinds of events that have an alert.
ALERTED = ("xid", "ecc", "aggregator", "rejected")
MAX_KINDS = len(KINDS) + 10  # maximum number of event kinds, because ranks may send unknown kinds

Samples = Sequence[tuple[dict[str, str], float]]
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


class MetricsPage(Collector):
    """The served values, which the sink's thread writes and the server's threads read.

    Args:
        identity: returns the identity of the run.
        clock: returns a monotonic time in seconds.
        runbook_url: address of the page with the steps for alerts.
    """

    def __init__(self, identity: Callable[[], Identity], clock: Callable[[], float], runbook_url: str = "") -> None:
        self._identity, self._runbook_url = identity, runbook_url
        self._labels = {"run_id": identity().run_id or ""}
        self._clock = clock
        self._lock = threading.Lock()
        self._report: ClusterReport | None = None
        self._since_s = 0.0
        self._is_stalled = False
        self._events = dict.fromkeys(ALERTED, 0)  # 0 from the start, so that increase() includes the first event

    def take(self, report: ClusterReport) -> None:
        with self._lock:
            self._report, self._since_s = report, self._clock()

    def count(self, kind: str, count: int) -> None:
        with self._lock:
            kind = kind if kind in self._events or len(self._events) < MAX_KINDS else "other"
            self._events[kind] = self._events.get(kind, 0) + count
            if kind in ("stalled", "resumed"):
                self._is_stalled = kind == "stalled"

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            report, age_s, events = self._report, self._clock() - self._since_s, dict(self._events)
            is_stalled = self._is_stalled
        is_fresh = report is not None and age_s <= max(FRESH_WINDOWS * report.last.loop.time_s, FRESH_S)
        yield self._family("fresh", "1: the newest report of the job is new enough to be shown.", is_fresh)
        yield self._family("stalled", "1: the ranks, or some of them, make no progress (event stalled).", is_stalled)
        counted = [({"kind": kind}, float(count)) for kind, count in sorted(events.items())]
        info = _labels(self._identity()) | ({"runbook_url": self._runbook_url} if self._runbook_url else {})
        text = "Number of events by kind; their texts are in events.jsonl."
        yield self._family("events", text, counted, CounterMetricFamily)
        yield self._family("run_info", "1: the labels are the identity of the run.", [(info, 1.0)])
        if report is None:
            return
        yield self._family("report_age_seconds", "Time since the receipt of the newest report.", age_s)
        for name, value in job_values(report).items():
            if name in TOTALS:
                yield self._family(name, JOB_VALUES[name], value, CounterMetricFamily)
            elif is_fresh or name in LASTING:
                yield self._family(name, JOB_VALUES[name], value)
        by_class = [({"class": name}, seconds) for name, seconds in report.gpu_seconds.items()]
        yield self._family("gpu_seconds", "GPU-seconds of all attempts by class; their sum is the total.", by_class)
        if is_fresh:
            yield from self._measured(report)

    def _measured(self, report: ClusterReport) -> Iterator[Metric]:
        for entry in metrics.METRICS.values():
            name, factor = name_of(entry)
            values = [(base, report.values.get(entry.tag(base))) for base in entry.bases]
            samples = [({BASE: base}, value * factor) for base, value in values if value is not None]
            if (entry.chart or entry.name in SERVED_TOO) and any(math.isfinite(value) for _, value in samples):
                yield self._family(name, entry.help, [one for one in samples if math.isfinite(one[1])])
        for name, spread in report.spread.items():
            parts = [({QUANTILE: value}, float(getattr(spread, part))) for part, value in PARTS.items()]
            yield self._family(name, f"Distribution; 0 is the smallest value, 1 the largest: {SPREADS[name]}.", parts)

    def _family(self, name: str, text: str, samples: Samples | float, kind: Family = GaugeMetricFamily) -> Metric:
        """Return a metric; a number is a sample without further labels."""
        rows = [({}, float(samples))] if isinstance(samples, (int, float)) else samples
        family = kind(f"{PREFIX}_{name}", text, labels=[*self._labels, *(rows[0][0] if rows else ())])
        for labels, value in rows:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family


def _labels(identity: Identity) -> dict[str, str]:
    """Return the labels of the info series; an unknown value is empty, and a long one is cut."""
    tags = dict(tag.partition("=")[::2] for tag in identity.tags)
    # The page ends before the run, so its identity has no end.
    facts = {name: value for name, value in asdict(identity).items() if name not in ("run_id", "ended_time_s")}
    facts["project"] = tags.get("project") or identity.account  # as in effllm runs
    texts = {name: ",".join(value) if isinstance(value, tuple) else value for name, value in facts.items()}
    return {name: "" if value is None else str(value)[:MAX_LABEL_LETTERS] for name, value in texts.items()}
