"""The sink mlflow: the values of a job in the run that the training opened, in files and on a real server."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from contextlib import contextmanager, suppress

import jobs
import pytest

pytest.importorskip("mlflow", reason="needs mlflow")

from mlflow.tracking.client import MlflowClient

from effllm.metrics.output_names import chart_tag, has_chart

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "GIT_PYTHON_REFRESH": "quiet", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
#: A loop that writes its own metric; "before" starts the run before torch is imported.
SCRIPT = """
import os, sys, time
from pathlib import Path

def begin():
    import mlflow
    mlflow.set_tracking_uri(os.environ["URI"])
    if os.environ.get("RANK", "0") == "0":
        mlflow.start_run()

if "before" in sys.argv:
    begin()
import torch
if "after" in sys.argv:
    begin()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, int(sys.argv[1]) + 1):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if "before" in sys.argv or "after" in sys.argv:
        import mlflow
        mlflow.active_run() and mlflow.log_metric("own", step, step=step)
while "until" in sys.argv and not Path("enough").exists():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


@contextmanager
def serving(folder):
    """Start a real server of MLflow; yield its address and its process."""
    port = jobs.unused_port()
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    with (folder / "server.txt").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **QUIET}, start_new_session=True, cwd=folder
        )
    try:
        jobs.until(lambda: answers(address))
        yield address, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(20)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return the address of a server for several tests, because its start takes many seconds."""
    with serving(tmp_path_factory.mktemp("server")) as (address, _):
        yield address


def answers(address):
    with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def only_run(uri, experiment=None):
    """Return the client and the only run of an experiment, or of all experiments."""
    client = MlflowClient(uri)
    ids = [one.experiment_id for one in client.search_experiments() if experiment in (None, one.name)]
    (run,) = client.search_runs(ids)
    return client, run


def finished(frameworks, uri, *arguments, environ, experiment=None, **more):
    """Return a job that ends after its first values are in MLflow, because the import of MLflow takes seconds."""
    environ = {**QUIET, **({"MLFLOW_EXPERIMENT_NAME": experiment} if experiment else {}), **environ}
    job = frameworks.start(
        SCRIPT, *arguments, "until", sinks="console,mlflow", environ=environ, log_interval=10, **more
    )
    jobs.until(lambda: has_values(uri, experiment))
    (job.folder / "enough").touch()
    return job.done()


def has_values(uri, experiment):
    with suppress(Exception):  # the store does not exist yet
        return "efficientllm/al_seconds" in only_run(uri, experiment)[1].data.metrics
    return False


def assert_equals_ledger(job, uri, experiment=None):
    client, run = only_run(uri, experiment)
    windows = job.ledger.windows
    for tag in ("al_seconds", "throughput/seconds_per_iteration", "energy/total_joules"):
        points = client.get_metric_history(run.info.run_id, chart_tag(tag))
        history = sorted((one.step, one.value) for one in points)
        expected = [(row.iteration, row.values[tag]) for row in windows if tag in row.values]
        assert expected, tag
        assert history == [(step, pytest.approx(value)) for step, value in expected], tag
    shown = {chart_tag(tag) for row in windows for tag in row.values if has_chart(tag)}
    assert shown <= set(run.data.metrics)
    return run


@pytest.mark.parametrize("when", ["before", "after"])
def test_windows_are_in_the_run_that_the_script_opened(frameworks, tmp_path, when, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    job = finished(frameworks, uri, 20, when, environ={"URI": uri})

    run = assert_equals_ledger(job, uri)
    assert run.data.metrics["own"] == 20
    assert run.info.status == "FINISHED"
    assert job.ledger.facts["mlflow_run_id"] == run.info.run_id
    assert job.ledger.summary.left_out == {}


def test_two_ranks_write_into_one_run_without_the_password(frameworks, server):
    secret = server.replace("//", "//me:hunter2@")
    environ = {"URI": secret, "MLFLOW_TRACKING_URI": secret}
    job = finished(frameworks, server, 20, "after", environ=environ, experiment="ranks", ranks=2)

    assert len(job.ledger.facts["ranks"]) == 2
    assert_equals_ledger(job, server, "ranks")
    assert job.ledger.facts["mlflow_tracking_uri"] == server
    assert "hunter2" not in "".join(one.read_text() for one in job.runs()[0].rglob("*.json*"))


def test_killed_server_costs_one_event_and_no_iteration(frameworks, tmp_path):
    with serving(tmp_path) as (address, server):
        run_id = MlflowClient(address).create_run("0").info.run_id
        environ = {**QUIET, "MLFLOW_TRACKING_URI": address, "MLFLOW_RUN_ID": run_id}
        job = frameworks.start(SCRIPT, 20, "until", sinks="console,mlflow:every=0", environ=environ)
        jobs.until(lambda: MlflowClient(address).get_run(run_id).data.metrics)
        os.killpg(server.pid, 9)
        server.wait(20)
        jobs.until(lambda: job.ledger.event_texts("sink"))
    (job.folder / "enough").touch()
    job.done()

    (text,) = [one for one in job.ledger.event_texts("sink") if "mlflow" in one]
    assert text.startswith("sink mlflow failed: WriteFailed")
    assert job.ledger.summary.left_out["mlflow"] > 0
    assert job.ledger.summary.status == "completed"
