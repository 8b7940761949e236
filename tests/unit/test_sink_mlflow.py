"""The sink mlflow without MLflow: its calls, the run that it uses, and what is left out."""

from __future__ import annotations

import pytest
from cases import cases
from sink_examples import make_report, make_run

from effllm.records.plain_text import without_user
from effllm.server.outputs import Writer
from effllm.sinks import WriteFailed, mlflow

FACTS = {"mlflow_run_id": "r1", "mlflow_tracking_uri": "http://host:5000"}


class Client:
    """Keeps the calls of a client, and fails if a test sets a reason."""

    def __init__(self):
        self.uris, self.calls, self.reason = [], [], ""

    def __call__(self, uri):
        self.uris.append(uri)
        return self

    def log_batch(self, run_id, metrics):
        self.calls.append((run_id, metrics))
        if self.reason:
            raise OSError(f"<Connection object at 0x{len(self.calls):x}>: {self.reason}")

    @property
    def steps(self):
        return {step for _, metrics in self.calls for *_, step in metrics}

    def values(self):
        return [{key: value for key, value, *_ in metrics} for _, metrics in self.calls]


@pytest.fixture
def client():
    return Client()


def opened(client, facts=FACTS, every=0.0, **changes):
    run = make_run(options={"every": every}, fact=facts.get, **changes)
    return mlflow.Mlflow(run, client, lambda *about: about)


def write(sink, *iterations, closed=False):
    for iteration in iterations:
        sink.write(make_report(iteration))
    for _ in range(2 if closed else 0):
        sink.close()


def test_values_have_the_iteration_and_the_time_of_their_window(client):
    opened(client).write(report := make_report(100))

    ((run_id, metrics),) = client.calls
    assert (run_id, client.uris) == ("r1", ["http://host:5000"])
    assert {(time_ms, step) for _, _, time_ms, step in metrics} == {(int(report.time_s * 1000), 100)}
    (values,) = client.values()
    assert values["efficientllm/al_seconds"] == report.values["al_seconds"]
    assert values["EffLLM/mfu"] == report.values["throughput/mfu_ratio"]


def test_number_of_values_in_doubt_is_written_if_there_are_any(client):
    sink = opened(client)
    write(sink, 100)
    sink.write(make_report(110, doubtful=("al_seconds",)))

    assert [one.get("efficientllm-health/doubtful_values") for one in client.values()] == [None, 1]


def test_windows_within_the_period_are_one_call(client):
    sink = opened(client, every=3600.0)
    write(sink, 10, 20, 30)
    assert client.calls == []
    write(sink, closed=True)

    assert (len(client.calls), client.steps) == (1, {10, 20, 30})


def test_long_queues_are_written_in_calls_that_mlflow_accepts(client):
    write(opened(client, every=3600.0), *range(10, 1010, 10), closed=True)

    assert len(client.calls) > 1
    assert all(len(metrics) <= 1000 for _, metrics in client.calls)
    assert len(client.steps) == 100


def test_values_wait_for_a_run_that_is_opened_later(client):
    facts = {}
    sink = opened(client, facts)
    write(sink, 10)
    facts.update(FACTS)
    write(sink, 20)
    assert client.steps == {10, 20}
    facts["mlflow_run_id"] = "r2"
    write(sink, 30)

    assert [run_id for run_id, _ in client.calls] == ["r1", "r1"], "a job has one run"


def test_without_a_run_one_line_is_logged(client, monkeypatch):
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    lines = []
    write(opened(client, {}, log=lines.append), 10, closed=True)

    assert (lines, client.uris) == ([mlflow.NO_RUN], [])


def test_failures_have_one_text_and_count_all_lost_windows(client):
    client.reason = "refused"
    sink, lines = opened(client, every=3600.0), []
    writer = Writer("sink mlflow", lambda: sink, lines.append)
    writer.start()
    for iteration in (10, 20, 30, 40):
        report = make_report(iteration, final=iteration == 40)
        writer.put(lambda one, report=report: one.write(report), num_windows=1)
    writer.stop()

    assert writer.join(20.0)
    assert lines == ["sink mlflow failed: WriteFailed: OSError: refused"]
    assert writer.left_out == 4


def test_text_of_a_failure_has_no_password_and_does_not_change(client):
    client.reason = "API request to http://me:pw@host/api failed"
    sink = opened(client)
    for iteration in (10, 20):
        with pytest.raises(WriteFailed, match=r"^OSError: API request to http://host/api failed$"):
            sink.write(make_report(iteration))


@cases(
    ("fact", "own", "used"),
    [
        ("http://host:5000", None, "http://host:5000"),
        ("http://host:5000", "http://me:pw@host:5000", "http://me:pw@host:5000"),
        ("http://host:5000", "http://me:pw@other", "http://host:5000"),
        (None, "http://other", "http://other"),
        (None, None, None),
        (7, "http://other", "http://other"),
    ],
)
def test_credentials_are_only_used_for_the_same_server(fact, own, used):
    assert mlflow._tracking_uri(fact, {"MLFLOW_TRACKING_URI": own} if own else {}) == used


@cases(
    ("uri", "shown"),
    [
        ("http://me:p@w@host:5000/x@y", "http://host:5000/x@y"),
        ("file:///a@b/c", "file:///a@b/c"),
        ("postgresql://me:pw@host/db", "postgresql://host/db"),
        ("postgresql://me:p/w@host/db", "postgresql://host/db"),
        ("mysql+pymysql://host/db?password=pw&ssl=1", "mysql+pymysql://host/db?password=&ssl=1"),
        ("sqlite:///C:/a@b.db", "sqlite:///C:/a@b.db"),
    ],
)
def test_user_and_password_are_removed_from_a_uri(uri, shown):
    assert without_user(uri) == shown
