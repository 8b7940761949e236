"""Trackers of a job on two hosts, in two network namespaces: the values of both hosts, each GPU once, in one run."""

from __future__ import annotations

from contextlib import suppress

import jobs
import pytest
from wandb_history import OFFLINE, rows

from effllm.metrics.output_names import chart_tag

pytest.importorskip("wandb", reason="needs wandb")
pytest.importorskip("mlflow", reason="needs mlflow")

from mlflow.tracking.client import MlflowClient

pytestmark = pytest.mark.timeout(300)

#: Rank 0 opens a run of W&B and one of MLflow; both ranks train until a file exists.
SCRIPT = """
import os, sys, time
from pathlib import Path
import effllm

writes = os.environ["SLURM_PROCID"] == "0"
if writes:
    import mlflow, wandb
    mlflow.set_tracking_uri(os.environ["URI"])
    mlflow.start_run()
    run = wandb.init(project="p", mode="offline", dir=".", settings=wandb.Settings(x_disable_stats=True))
    Path(sys.argv[2]).touch()
while not Path(sys.argv[2]).exists():  # the imports take seconds
    time.sleep(0.05)
effllm.initialize_efficientllm_metrics(1000)
collector, step = effllm.get_metrics_collector(), 0
while not Path(sys.argv[1]).exists():
    step += 1
    collector.record_iteration_start()
    time.sleep(0.05)
    collector.record_iteration_end(100, 2)
    collector.log_metrics(step, 1.0)
    if writes:
        wandb.log({"mine": step}, step=step)
effllm.finalize_efficientllm_metrics()
if writes:
    run.finish()
"""


def test_trackers_have_the_values_of_both_hosts_in_one_run(hosts, launch, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pair, uri, enough = hosts(2), (tmp_path / "mlruns").as_uri(), tmp_path / "enough"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "MASTER_ADDR": pair[0].address}
    environ = {**step, **OFFLINE, "URI": uri, "MLFLOW_DISABLE_TELEMETRY": "true", "GIT_PYTHON_REFRESH": "quiet"}
    first, second = [
        launch.on(host).python(
            script,
            enough,
            tmp_path / "ready",
            environ={**environ, "SLURM_PROCID": str(rank)},
            sinks="console,wandb,mlflow:every=0",
        )
        for rank, host in enumerate(pair)
    ]
    jobs.until(lambda: "efficientllm/al_seconds" in metrics_of(uri))
    jobs.until(lambda: first.ledger.num_windows > 3)
    enough.touch()
    first.done(), second.done()

    windows = {row.iteration: row for row in first.ledger.windows if "energy/total_joules" in row.values}
    last, by_device = windows[max(windows)], first.ledger.summary.energy.by_device
    assert len(by_device) == 2
    assert (last.coverage.ranks_reporting, last.coverage.gpus_measured) == (2, 2)
    assert max(by_device.values()) < last.values["energy/total_joules"] <= sum(by_device.values()) * (1 + 1e-9)

    joined = [row for row in rows(first) if "efficientllm/iteration" in row]
    assert len(joined) > 1
    for row in joined:
        values = windows[row["efficientllm/iteration"]].values
        assert row["efficientllm/al_seconds"] == pytest.approx(values["al_seconds"])
        assert row["EffLLM/energy_kwh"] == pytest.approx(values["energy/total_joules"] / 3.6e6)

    (run,) = runs_of(uri)
    for tag in ("energy/total_joules", "throughput/tokens_per_second", "al_seconds"):
        points = MlflowClient(uri).get_metric_history(run.info.run_id, chart_tag(tag))
        expected = {row.iteration: row.values[tag] for row in first.ledger.windows if tag in row.values}
        assert {one.step: one.value for one in points} == pytest.approx(expected), tag


def runs_of(uri):
    client = MlflowClient(uri)
    return client.search_runs([one.experiment_id for one in client.search_experiments()])


def metrics_of(uri):
    with suppress(Exception):  # there is no run yet, or a file of the store is just being written
        return runs_of(uri)[0].data.metrics
    return {}
