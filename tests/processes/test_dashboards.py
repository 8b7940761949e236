"""The Grafana dashboards: their structure, and every query against a real Prometheus that reads real jobs."""

from __future__ import annotations

import json
import re

import jobs
import pytest
from prometheus_server import CONFIGS, PrometheusServer, needs_prometheus, pages
from sink_examples import complete_totals, make_report, with_keys

from effllm import metrics
from effllm.records.identity import Identity
from effllm.records.job import SPREADS, Spread
from effllm.records.rank import Event

FILES = ("job", "fleet")


def dashboard(name):
    return json.loads((CONFIGS / "grafana" / f"{name}.json").read_text())


def queries(name):
    """Yield (title, refId, query, whether instant) of each query of a dashboard, with those of its annotations."""
    board = dashboard(name)
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["refId"], target["expr"], target["instant"]
    for one in board["annotations"]["list"]:
        if "expr" in one.get("target", {}):
            yield f"annotation {one['name']}", "A", one["target"]["expr"], True


def sources(value):
    """Yield each value with the key "datasource"."""
    if isinstance(value, dict):
        yield from (one for key, one in value.items() if key == "datasource")
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from sources(one)


@pytest.mark.parametrize("name", FILES)
def test_dashboard_can_be_imported_into_any_installation(name):
    board = dashboard(name)

    assert board["uid"] == f"effllm-{name}" and len(board["uid"]) <= 40
    assert board["schemaVersion"] >= 39 and "id" not in board
    assert {(one["type"], one["uid"]) for one in sources(board)} == {
        ("prometheus", "${datasource}"),
        ("grafana", "-- Grafana --"),
    }
    first = board["templating"]["list"][0]
    assert (first["type"], first["name"], first["query"]) == ("datasource", "datasource", "prometheus")
    used = set(re.findall(r"\$\{?(\w+)", " ".join(query for _, _, query, _ in queries(name))))
    assert used <= {one["name"] for one in board["templating"]["list"]} | {"__range", "__rate_interval"}


@pytest.mark.parametrize("name", FILES)
def test_panels_do_not_overlap_and_have_unique_ids(name):
    panels = dashboard(name)["panels"]
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]

    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)


#: Queries without data for the healthy simulated jobs of this test, with the reason.
NOT_SIMULATED = "simulated devices have no such reading"
ONE_RANK = "a job of one rank has no sync point and no slowest rank"
HEALTHY = "nothing is wrong"
EMPTY = {
    ("job", "Stragglers", "A"): ONE_RANK,
    ("job", "Slowest rank", "A"): ONE_RANK,
    ("job", "Slowest rank", "B"): ONE_RANK,
    ("job", "GPUs not used", "A"): "no scheduler states GPUs without Slurm",
    ("job", "Shares of the iteration time", "B"): "no iteration is profiled",
    ("job", "Activity", "A"): NOT_SIMULATED,
    ("job", "Activity", "B"): NOT_SIMULATED,
    ("job", "Activity", "C"): NOT_SIMULATED,
    ("job", "Temperature and clock", "A"): NOT_SIMULATED,
    ("job", "Clocks lowered by heat or the board", "A"): NOT_SIMULATED,
    ("job", "Events", "A"): HEALTHY,
    ("job", "annotation Stalls", "A"): HEALTHY,
    ("fleet", "Stalled jobs: seconds without a report", "A"): HEALTHY,
    ("fleet", "Jobs with idle GPUs: busy share", "A"): HEALTHY,
    ("fleet", "Jobs with unused GPUs", "A"): HEALTHY,
    ("fleet", "Firing alerts", "A"): HEALTHY,
}

SBATCH = {"SLURM_JOB_ID": "4711", "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_NAME": 'a"b\\c{d}\n<b>'}
SETTINGS = {"price_per_gpu_hour": 2.5, "price_per_kwh": 0.2, "carbon_intensity": 380, "peak_tflops": 989}
VARIABLES = {"__range": "10m", "__rate_interval": "1m", "user": ".*", "project": ".*", "partition": ".*"}
LOOP = """
import time
from pathlib import Path
import effllm.efficientllm_metrics as effllm
effllm.initialize_efficientllm_metrics(1000, flops_per_token=6e9, hardware_flops_per_token=8e9)
collector = effllm.get_metrics_collector()
iteration = 0
while not Path("enough").exists():
    iteration += 1
    collector.record_iteration_start()
    time.sleep(0.01)
    collector.record_iteration_end(100, 2)
    collector.log_metrics(iteration, 1.0)
effllm.finalize_efficientllm_metrics()
"""


def filled(query, **values):
    for name, value in {**VARIABLES, **values}.items():
        query = re.sub(rf"\$\{{?{name}\b\}}?", lambda _, value=value: value, query)
    assert "$" not in query, query
    return query


def without_data(server, **values):
    """Return the queries of both dashboards without data, and all queries; fail if Prometheus rejects a query."""
    found = {(name, title, ref): query for name in FILES for title, ref, query, _ in queries(name)}
    return {key for key, query in found.items() if not server.ask(filled(query, **values))}, set(found)


@needs_prometheus
@pytest.mark.faults
def test_every_query_has_data_for_real_jobs_or_a_reason(launch, tmp_path):
    targets = tmp_path / "targets"
    targets.mkdir()
    sinks = f"prometheus:port=0:discovery_dir={targets}"
    with PrometheusServer(tmp_path / "prometheus", **{"/run/effllm-targets": str(targets)}) as server:
        started = [
            launch.code(
                LOOP, run_name=f"run-{user}", sinks=sinks, tags=f"project={project}",
                environ={**SBATCH, "SLURM_JOB_USER": user}, **SETTINGS,
            )
            for user, project in (("alice", "vision"), ("bob", "speech"))
        ]  # fmt: skip
        # The second rule of a group may see a scrape that the first rule missed.
        for rule in ("joules_per_token", "tokens_per_second"):
            jobs.until(lambda rule=rule: len(server.ask(f"efficientllm:{rule} > 0")) == 2)
        instance = sorted(server.targets())[0]
        empty, every = without_data(server, instance=instance)
        assert empty == EMPTY.keys()

        labels = {
            name: server.get(f"label/{name}/values", **{"match[]": "efficientllm_run_info"})
            for name in ("user", "project", "partition")
        }
        assert labels == {"user": ["alice", "bob"], "project": ["speech", "vision"], "partition": ["gpu"]}
        by_user = next(query for title, ref, query, _ in queries("fleet") if (title[:7], ref) == ("By user", "A"))
        (only,) = server.ask(filled(by_user, user="(alice|carol)"))
        assert only["metric"] == {"user": "alice"}

        kept = every - empty - {("job", "State", "A")}
        shown = {key for key in kept if is_shown_after_the_end(*key)}
        for job in started:
            (job.folder / "enough").touch()
            job.done()
        jobs.until(lambda: server.targets() == {})
        jobs.until(lambda: not server.ask("efficientllm_fresh"))
        gone, _ = without_data(server, instance=instance)
        assert shown and not shown & gone, "the last values of an ended job stay"


def is_shown_after_the_end(name, title, ref):
    """Whether a query shows last values; charts show the past, and states are those of running jobs."""
    (query, is_instant) = next(rest for other, one, *rest in queries(name) if (other, one) == (title, ref))
    return is_instant and "$__range" in query and "efficientllm_stalled" not in query


@needs_prometheus
@pytest.mark.faults
def test_every_query_has_data_for_a_job_with_every_problem(tmp_path):
    targets = tmp_path / "targets"
    targets.mkdir()
    identity = Identity(run_id="bad", user="eve", account='a"\\<b>{}', partition="gpu", job_id="7", tags=("x",))
    everything = with_keys(complete_totals(100), utilization_mean=0.1)
    values = {
        "values": metrics.window_values(everything, everything, everything), "gpus_unused": 2,
        "gpu_seconds": {"useful": 640.0, "startup": 160.0, "unused": 150.0},
        "spread": {name: Spread(8, 0.5, 0.5, 0.625, 0.75, 1.0) for name in SPREADS},
    }  # fmt: skip
    report = make_report(100, **values)
    later = make_report(110, job=with_keys(report.job, tokens=10**7, energy_measured_j=1e6), **values)
    with (
        pages(tmp_path) as serve,
        PrometheusServer(tmp_path / "prometheus", **{"/run/effllm-targets": str(targets)}) as server,
    ):
        sink = serve(report, discovery_dir=targets, identity=identity)
        jobs.until(lambda: server.ask('efficientllm_events_total{kind="xid"} == 0'))
        sink.event(Event(1.0, "stalled", "text"))
        sink.event(Event(1.0, "xid", "text"))
        sink.write(later)
        jobs.until(lambda: server.ask('ALERTS{alertname="GpuError",alertstate="firing"}'))
        jobs.until(lambda: server.ask("efficientllm:joules_per_token"))
        (instance,) = server.targets()
        jobs.until(lambda: not without_data(server, instance=instance)[0])
        (firing,) = server.ask('ALERTS{alertstate="firing"}')

    assert firing["metric"]["kind"] == "xid"
