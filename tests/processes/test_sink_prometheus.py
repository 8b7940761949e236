"""The sink prometheus: its samples, missing samples, and a scrape by a real Prometheus."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import jobs
import msgspec
import pytest
from cases import cases
from prometheus_server import CONFIGS, PrometheusServer, needs_prometheus, pages
from sink_examples import complete_totals, make_report, totals, with_keys

from effllm import metrics
from effllm.records.identity import Identity
from effllm.records.job import Spread
from effllm.records.rank import Event

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402

from effllm.sinks import prometheus  # noqa: E402

LABELS = {"run_id": "mine"}


class Values:
    """The samples of the sink without its server, because the server needs half a second to stop."""

    def __init__(self):
        self.identity, self.now_s = Identity(run_id="mine"), 1000.0
        self.values = prometheus.MetricsPage(lambda: self.identity, lambda: self.now_s)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self.values)
        self.write = self.values.set_report
        self.event = lambda event: self.values.count_events(event.kind, event.count)

    def page(self):
        return generate_latest(self.registry).decode()


@pytest.fixture
def sink():
    return Values()


def samples(text):
    """Return {(name, other labels): value} of every sample; each sample must have the labels of the run."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.items() >= LABELS.items()
            rest = tuple(sorted((key, value) for key, value in sample.labels.items() if key not in LABELS))
            found[(sample.name, *rest)] = sample.value
    return found


def served(sink):
    return samples(sink.page())


def by_label(sink, name):
    """Return the values of a metric by its only other label."""
    return {label: value for (one, *labels), value in served(sink).items() if one == name for _, label in labels}


def test_spread_of_ranks_is_served_as_five_quantiles(sink):
    sink.write(make_report(spread={"step_seconds": Spread(8, 0.5, 0.5, 0.625, 0.75, 1.0)}))

    shown = {"0": 0.5, "0.05": 0.5, "0.5": 0.625, "0.95": 0.75, "1": 1.0}
    assert by_label(sink, "efficientllm_step_seconds") == shown


def test_gpu_seconds_of_the_allocation_are_served_by_class(sink):
    gpu_seconds = {"useful": 640.0, "startup": 160.0, "unused": 150.0}
    sink.write(make_report(100, gpu_seconds=gpu_seconds, gpus_unused=2))

    assert by_label(sink, "efficientllm_gpu_seconds") == gpu_seconds
    assert served(sink)["efficientllm_gpus_unused",] == 2


def test_stalled_is_1_from_the_stall_until_the_job_resumes(sink):
    seen = []
    for kind in ("joined", "stalled", "warning", "resumed"):
        sink.event(Event(1.0, kind, "text"))
        seen.append(served(sink)["efficientllm_stalled",])

    assert seen == [0, 1, 1, 0]


@cases(
    ("tags", "account", "project"),
    [(("project=vision", "a"), "physics", "vision"), (("a",), "physics", "physics"), ((), None, "")],
)
def test_project_is_the_tag_or_else_the_account(sink, tags, account, project):
    sink.identity = Identity(run_id="mine", tags=tags, account=account)

    assert f'project="{project}"' in sink.page()


def test_newest_values_are_served_in_base_units(sink):
    sink.write(make_report(90))
    sink.write(report := make_report(100))

    expected = {
        ("amu_bytes", ("over", "run")): 45.23 * 2**30,
        ("aec_watts", ("over", "run")): report.values["aec_watts"],
        ("aec_watts", ("over", "window")): report.values["window/aec_watts"],
        ("iteration",): 100,
        ("fresh",): 1,
        ("tokens_total",): report.job.counts.tokens,
        ("iterations_total",): report.job.counts.iterations,
        ("energy_measured_joules_total",): report.job.energy.measured_j,
        ("reports_lost_total",): report.coverage.reports_lost,
        ("ranks_reporting",): report.coverage.ranks_reporting,
        ("straggler_rank",): report.straggler.rank,
    }
    seen = served(sink)
    found = {(name, *labels): seen[(f"efficientllm_{name}", *labels)] for name, *labels in expected}
    assert found == pytest.approx(expected)


def test_labels_of_the_run_identity_are_escaped_and_cut(sink):
    sink.identity = Identity(
        run_id="mine", job_name='a"b\\c\nd', hosts=tuple(f"{n:0100}" for n in range(32)), tags=("a=1", "b")
    )

    (info,) = [one for one in parser.text_string_to_metric_families(sink.page()) if one.name == "efficientllm_run_info"]
    (sample,) = info.samples

    labels = sample.labels
    assert (sample.value, labels["run_id"], labels["job_name"], labels["tags"]) == (1.0, "mine", 'a"b\\c\nd', "a=1,b")
    assert len(labels["hosts"]) == 1000
    assert labels["user"] == labels["model"] == labels["started_time_s"] == ""


def test_no_totals_are_served_for_quantities_that_are_not_counted(sink):
    sink.write(make_report(100, job=with_keys(totals(100), tokens=0, samples=0)))

    assert not {"tokens_total", "samples_total"} & names(sink)


def test_first_page_has_only_event_counters_and_the_identity(sink):
    assert names(sink) == {"events_total", "run_info", "fresh", "stalled"}
    assert served(sink)["efficientllm_fresh",] == served(sink)["efficientllm_stalled",] == 0
    counts = set(by_label(sink, "efficientllm_events_total").values())
    assert counts == {0.0}, "increase() needs 0 before the first event of a kind"


def test_no_sample_is_served_for_a_value_that_is_no_longer_measured(sink):
    sink.write(report := make_report(100))
    assert "aec_watts" in names(sink)
    values = {tag: value for tag, value in report.values.items() if "aec_watts" not in tag}
    sink.write(make_report(110, values={**values, "pcu_ratio": float("nan")}))

    assert "aec_watts" not in names(sink)
    assert ("efficientllm_pcu_ratio", ("over", "run")) not in served(sink)


def names(sink):
    return {name.removeprefix("efficientllm_") for name, *_ in served(sink)}


def test_old_values_are_removed_and_totals_are_kept(sink):
    sink.write(report := make_report(100))  # the window lasts 4.12 s, so its values are served for a minute
    sink.now_s = 1060.0
    assert "aec_watts" in names(sink)
    sink.now_s = 1060.1
    assert names(sink) >= {"fresh", "report_age_seconds", "tokens_total"}
    assert not names(sink) & {"aec_watts", "ranks_reporting", "loss"}

    sink.write(msgspec.structs.replace(report, last=with_keys(report.last, time_s=600.0)))
    sink.now_s += 1800.0
    assert "aec_watts" in names(sink), "values are fresh for three windows of ten minutes"
    sink.now_s += 0.1
    assert "aec_watts" not in names(sink)


def test_labels_contain_no_ranks_and_few_event_kinds(sink):
    for number in range(1000):
        sink.event(Event(1.0, f"kind_{number}", "text", rank=number))
    sink.write(make_report(100))

    text = sink.page()

    assert not re.search(r"\brank=", text)
    assert text.count("efficientllm_events_total{") == prometheus.MAX_KINDS + 1
    assert 'kind="other"' in text
    assert len(text.splitlines()) < 400


BASE_UNITS = {
    "bytes", "watts", "joules", "seconds", "ratio", "hertz", "celsius", "grams", "flops", "tokens", "samples", "cost",
    "iterations", "sec",
}  # fmt: skip


def test_name_of_every_metric_is_unique_and_in_base_units():
    charted = [entry for entry in metrics.METRICS.values() if entry.chart]
    names = [prometheus.base_unit_name(entry)[0] for entry in charted]

    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert set(name.split("_")) & BASE_UNITS, name
        assert not set(name.split("_")) & {"gb", "mhz", "tflops", "kg", "wh", "mw"}, name


def test_every_known_metric_is_served(sink):
    run = complete_totals(100)
    sink.write(report := make_report(100, values=metrics.window_values(run, run, run)))

    known = [entry for tag in report.values if (entry := metrics.metric_of_tag(tag)) and entry.chart]
    assert {prometheus.base_unit_name(entry)[0] for entry in known} <= names(sink)


@pytest.fixture
def serve(tmp_path):
    with pages(tmp_path) as open_page:
        yield open_page


def scrape(sink):
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def test_automatic_port_is_on_loopback_and_logged(serve):
    lines = []
    sink = serve(make_report(100), log=lines.append)

    assert samples(scrape(sink))["efficientllm_iteration",] == 100
    assert sink._server.server_address[0] == "127.0.0.1"
    assert lines == [f"metrics for Prometheus are at http://127.0.0.1:{sink.port}/metrics"]
    assert sink.port in jobs.listening_ports(jobs.os.getpid())
    sink.close()
    assert sink.port not in jobs.listening_ports(jobs.os.getpid())


@pytest.mark.parametrize("first", [b"", b"GET /metrics HTTP/1.1\r\nX-Slow: 1\r\n"], ids=["silent", "slow"])
def test_slow_connections_do_not_stop_a_scrape(serve, first):
    """Each of 200 connections sends a line of its request, and never the last line."""
    sink = serve()
    slow = [socket.create_connection(("127.0.0.1", sink.port)) for _ in range(200)]
    try:
        for one in slow:
            with contextlib.suppress(OSError):  # closed for a later one
                one.sendall(first)
        for _ in range(3):
            assert "efficientllm_fresh" in scrape(sink)
        jobs.until(lambda: threads() <= prometheus.web_server.MAX_PER_ADDRESS)
    finally:
        for one in slow:
            one.close()


def test_connection_ends_at_its_deadline(serve, monkeypatch):
    """A byte every 0.1 s keeps the timeout of the socket from its end, but not the deadline of the request."""
    monkeypatch.setattr(prometheus.web_server, "DEADLINE_S", 0.5)
    with socket.create_connection(("127.0.0.1", serve().port)) as slow:
        began_s = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began_s < 30:
                slow.sendall(b"X")
                time.sleep(0.1)


def threads():
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


# --- a real Prometheus ---


def promtool(*arguments, **options):
    return subprocess.run(["promtool", "check", *arguments], capture_output=True, text=True, check=False, **options)


@needs_prometheus
@pytest.mark.parametrize(("command", "name"), [("rules", "prometheus_rules.yml"), ("config", "prometheus.yml")])
def test_promtool_accepts_the_examples(command, name):
    done = promtool(command, CONFIGS / name)

    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_promtool_accepts_the_metrics_page(sink):
    sink.write(make_report(100))
    sink.event(Event(1.0, "joined", "rank 0 joined"))
    done = promtool("metrics", input=sink.page())

    # promtool also returns 3 for names with "per" and similar parts; this is advice and no error of the format.
    assert done.returncode in (0, 3), done.stderr
    assert "error" not in done.stderr.lower()


def test_event_with_a_count_increases_the_counter_by_its_count(sink):
    sink.event(Event(1.0, "ecc", "1 uncorrected memory errors"))
    sink.event(Event(1.0, "ecc", "more events", count=999_999))

    assert by_label(sink, "efficientllm_events_total")["ecc"] == 1_000_000


def test_prometheus_rules_use_only_served_metrics(sink):
    run = complete_totals(100)
    sink.write(make_report(100, values=metrics.window_values(run, run, run), gpus_unused=0))
    sink.event(Event(1.0, "rejected", "rank 0 sent a message of rank 1"))
    asked = set(re.findall(r"\befficientllm_\w+", (CONFIGS / "prometheus_rules.yml").read_text()))

    assert len(asked) >= 6
    assert asked <= {key[0] for key in served(sink)}


#: The job of a fixed address in prometheus.yml, which is a comment.
STATIC = {
    "# - job_name: efficientllm-static": "- job_name: efficientllm-static",
    "#   static_configs:": "  static_configs:",
    "#     - targets:": "    - targets:",
}


@needs_prometheus
@pytest.mark.faults
def test_real_prometheus_scrapes_a_job(launch, tmp_path):
    port = jobs.unused_port()
    with PrometheusServer(tmp_path / "prometheus", **STATIC | {"127.0.0.1:9788": f"127.0.0.1:{port}"}) as server:
        job = launch.python("loop.py", "--until", "enough", sinks=f"console,prometheus:port={port}", run_name="mine")
        (tokens,) = jobs.until(lambda: server.ask('efficientllm_tokens_total{run_id="mine"} > 0'))
        (watts,) = jobs.until(lambda: server.ask('efficientllm_aec_watts{over="run"}'))
        jobs.until(lambda: server.ask("efficientllm:tokens_per_second > 0"))
        job.finish()
        jobs.until(lambda: server.ask("up == 0"))
        assert server.ask("efficientllm_aec_watts") == [], "values are stale after the end of the job"

    assert set(tokens["metric"]) == {"__name__", "run_id", "instance", "job"}
    assert float(tokens["value"][1]) <= job.ledger.summary.tokens
    shown = [report.values["aec_watts"] for report in job.ledger.windows if "aec_watts" in report.values]
    # The query may return the value of any of the windows.
    assert float(watts["value"][1]) in [pytest.approx(value, rel=1e-6) for value in shown]
