"""Values of the job in the calls of a tracker: added once per report, never instead of the training's data."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from effllm.hooks import _energy_keys
from effllm.records.board import JobState
from effllm.trainer import trackers
from effllm.trainer.lifecycle import facts_of_open_mlflow_run
from effllm.trainer.values import JobValues

VALUES = {"al_seconds": 0.5, "pcu_ratio": float("nan"), "throughput/mfu_ratio": 0.4, "energy/total_joules": 7.2e6}


class SessionStandIn:
    """A session with values that a test sets."""

    def __init__(self):
        self.state, self.lines, self.fails = JobState(), [], False
        self._values = JobValues()

    def values(self):
        if self.fails:
            raise OSError("the board is closed")
        self._values.update_from(SimpleNamespace(read_state=lambda: self.state))
        return self._values

    def warn(self, line):
        self.lines.append(line)


@pytest.fixture
def session(monkeypatch):
    """Return a session, and a module like W&B's with a class Run that keeps its calls."""

    class Run:
        def __init__(self):
            self.calls = []

        def log(self, data, step=None, commit=None):
            """Keep a call."""
            self.calls.append((data, step, commit))
            return "answer"

    module = ModuleType("wandb.sdk.wandb_run")
    module.Run = Run
    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_run", module)
    one = SessionStandIn()
    trackers.begin(one, ["console", "wandb"], 0)
    yield one, Run()
    trackers.end(one)


def report(session, number, **values):
    session.state = JobState(number, 10 * number, {**VALUES, **values})


def test_each_report_joins_one_call(session):
    job, run = session
    data = {"loss": 3.0, "efficientllm/al_seconds": "mine"}  # keys of the training win
    report(job, 1)
    assert run.log(data, step=7) == "answer"
    run.log({"loss": 2.0})
    report(job, 2)
    run.log(data={"loss": 1.0}, commit=False)
    trackers.end(job)
    report(job, 3)
    run.log({"loss": 0.5})

    first, second, third, last = run.calls
    assert first == (
        {**data, "efficientllm/iteration": 10, "EffLLM/mfu": 0.4, "EffLLM/energy_kwh": pytest.approx(2.0)}, 7, None
    )  # fmt: skip
    assert data == {"loss": 3.0, "efficientllm/al_seconds": "mine"}
    assert (second, last) == (({"loss": 2.0}, None, None), ({"loss": 0.5}, None, None))
    assert (third[0]["efficientllm/iteration"], third[0]["efficientllm/al_seconds"]) == (20, 0.5)
    assert third[1:] == (None, False)
    assert job.lines == []
    with pytest.raises(TypeError):
        run.log()  # an error of the tracker reaches the training


@pytest.mark.parametrize("has_report", [True, False])
def test_end_without_a_call_after_a_report_gives_one_line(session, has_report):
    job, run = session
    run.log({"loss": 3.0})
    if has_report:
        report(job, 1)
    for _ in range(2):
        trackers.end(job)

    assert run.calls == [({"loss": 3.0}, None, None)]
    assert (
        job.lines
        == ["sink wandb: no call of wandb.log on this rank after the first report, so no value joined a run here"]
        * has_report
    )


@pytest.mark.parametrize("data", [None, "text", [1], 3.0])
def test_data_that_is_no_dictionary_is_passed_on(session, data):
    job, run = session
    report(job, 1)

    run.log(data)

    assert run.calls == [(data, None, None)]


def test_failure_of_effllm_does_not_reach_the_call_and_is_reported(session):
    job, run = session
    report(job, 1)
    job.fails = True

    run.log({"loss": 3.0})
    job.fails = False
    run.log({"loss": 2.0})

    assert run.calls == [({"loss": 3.0}, None, None), ({"loss": 2.0}, None, None)]
    assert job.lines == ["sink wandb: its runs get no more values: OSError: the board is closed"]


def test_failure_in_a_forked_child_is_not_reported_by_the_child(session, monkeypatch):
    job, run = session
    report(job, 1)
    job.fails = True

    with monkeypatch.context() as child:
        child.setattr(trackers._JOINING, "pid", -1)
        run.log({"loss": 3.0})

    assert (run.calls, job.lines) == ([({"loss": 3.0}, None, None)], [])


@pytest.mark.parametrize("sinks", [["wandb"], ["console"]])
def test_open_run_of_a_module_function_is_hooked_only_for_its_sink(monkeypatch, sinks):
    class Run:
        def log(self, data):
            return data

    package, module, run, job = ModuleType("wandb"), ModuleType("wandb.sdk.wandb_run"), Run(), SessionStandIn()
    package.run, package.log, module.Run, original = run, run.log, Run, Run.log
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_run", module)
    trackers.begin(job, sinks, 0)
    report(job, 1)

    assert ("efficientllm/al_seconds" in package.log({"loss": 3.0})) is (sinks == ["wandb"])
    assert (Run.log is original) is (sinks == ["console"])
    trackers.end(job)


def test_run_that_cannot_be_wrapped_does_not_stop_the_training(monkeypatch):
    class Frozen(type):
        def __setattr__(cls, name, value):
            raise TypeError("frozen")

    module, job = ModuleType("wandb.sdk.wandb_run"), SessionStandIn()
    module.Run = Frozen("Run", (), {"log": lambda *_: None})
    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_run", module)
    trackers.begin(job, ["wandb"], 0)
    report(job, 1)
    trackers.end(job)

    assert len(job.lines) == 1


@pytest.mark.parametrize("version", ["no run", "open run", "another version"])
def test_open_run_of_mlflow_is_found_without_a_hook(monkeypatch, version):
    fluent, service = ModuleType("mlflow.tracking.fluent"), ModuleType("mlflow.tracking._tracking_service.utils")
    run = SimpleNamespace(info=SimpleNamespace(run_id="abc")) if version == "open run" else None
    if version != "another version":
        fluent.active_run = lambda: run
    service.get_tracking_uri = lambda: "https://me:secret@host/"
    monkeypatch.setitem(sys.modules, fluent.__name__, fluent)
    monkeypatch.setitem(sys.modules, service.__name__, service)

    found = facts_of_open_mlflow_run(["console", "mlflow"])

    known = {"mlflow_run_id": "abc", "mlflow_tracking_uri": "https://host/"}
    assert found == (known if version == "open run" else {})
    assert facts_of_open_mlflow_run(["console"]) == {}


@pytest.fixture
def module():
    return SimpleNamespace(rewrite_logs=lambda logs: {f"train/{key}": value for key, value in logs.items()})


def test_only_keys_of_the_energy_have_no_prefix(module):
    _energy_keys.wrap_rewrite_logs(module)

    assert module.rewrite_logs({"energy_step/power_avg_w": 300.0, "loss": 2.0, "energy_of_mine": 1.0}) == {
        "energy_step/power_avg_w": 300.0,
        "train/loss": 2.0,
        "train/energy_of_mine": 1.0,
    }


def test_function_of_transformers_is_wrapped_once(module):
    _energy_keys.wrap_rewrite_logs(module)
    wrapped = module.rewrite_logs
    _energy_keys.wrap_rewrite_logs(module)

    assert module.rewrite_logs is wrapped


def test_other_version_of_the_function_is_left_as_it_is():
    module = SimpleNamespace(rewrite_logs=lambda logs: None)
    _energy_keys.wrap_rewrite_logs(module)
    _energy_keys.wrap_rewrite_logs(SimpleNamespace())

    assert module.rewrite_logs({"loss": 2.0}) is None
