"""Values of the job in the calls of a tracker: added once per report, never instead of the training's data."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

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
        self._values.read(SimpleNamespace(read=lambda: self.state))
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
    report(job, 1)
    run.log({"loss": 3.0}, step=7)
    run.log({"loss": 2.0})
    report(job, 2)
    run.log(data={"loss": 1.0}, commit=False)

    first, second, third = run.calls
    assert first == (
        {
            "loss": 3.0,
            "efficientllm/iteration": 10,
            "EffLLM/mfu": 0.4,
            "EffLLM/energy_kwh": pytest.approx(2.0),
            "efficientllm/al_seconds": 0.5,
        },
        7,
        None,
    )
    assert second == ({"loss": 2.0}, None, None)
    assert third[0]["efficientllm/iteration"] == 20
    assert third[1:] == (None, False)


def test_data_of_the_training_is_not_changed_and_its_keys_win(session):
    job, run = session
    report(job, 1)
    data = {"efficientllm/al_seconds": "mine", "image": object()}
    kept = dict(data)

    assert run.log(data) == "answer"

    assert data == kept
    assert run.calls[0][0]["efficientllm/al_seconds"] == "mine"
    assert run.calls[0][0]["image"] is data["image"]


@pytest.mark.parametrize("data", [None, "text", [1], 3.0])
def test_data_that_is_no_dictionary_is_passed_on(session, data):
    job, run = session
    report(job, 1)

    run.log(data)

    assert run.calls == [(data, None, None)]


def test_failure_of_effllm_does_not_reach_the_call(session):
    job, run = session
    report(job, 1)
    job.fails = True

    run.log({"loss": 3.0})
    job.fails = False

    assert run.calls == [({"loss": 3.0}, None, None)]


def test_failure_of_the_tracker_reaches_the_training(session):
    _, run = session

    with pytest.raises(TypeError):
        run.log()


def test_no_report_means_no_key_and_no_line(session):
    job, run = session
    run.log({"loss": 3.0})
    trackers.end(job)

    assert run.calls == [({"loss": 3.0}, None, None)]
    assert job.lines == []


def test_loop_without_calls_gets_one_line(session):
    job, _ = session
    report(job, 1)
    trackers.end(job)
    trackers.end(job)

    assert job.lines == [
        "sink wandb: no call of wandb.log on this rank after the first report, so no value joined a run here"
    ]


def test_after_the_end_nothing_is_added(session):
    job, run = session
    report(job, 1)
    trackers.end(job)
    run.log({"loss": 3.0})

    assert run.calls == [({"loss": 3.0}, None, None)]


def test_open_run_of_a_module_function_is_hooked(monkeypatch):
    class Run:
        def log(self, data):
            return data

    package, module, run, job = ModuleType("wandb"), ModuleType("wandb.sdk.wandb_run"), Run(), SessionStandIn()
    package.run, package.log, module.Run = run, run.log, Run
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_run", module)
    trackers.begin(job, ["wandb"], 0)
    report(job, 1)

    assert "efficientllm/al_seconds" in package.log({"loss": 3.0})
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


def test_tracker_without_its_sink_is_not_changed(monkeypatch):
    class Run:
        def log(self, data):
            return data

    module, original = ModuleType("wandb.sdk.wandb_run"), Run.log
    module.Run = Run
    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_run", module)
    trackers.begin(job := SessionStandIn(), ["console"], 0)
    trackers.end(job)

    assert Run.log is original


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
