"""Bad input has a defined result and one clear line; measurements are kept and training is not affected."""

import json
import math
import os
import socket
import time

import jobs
import msgspec
import pytest
import zmq

from effllm.network.transport import MAGIC, encode
from effllm.records.rank import Device, Event, ParameterCount, RankReport
from effllm.records.wire import AgentEvent, Bye, Heartbeat, Hello, Reports

LOOP = "loop.py"
SERVED = (LOOP, "--served")


def assert_disabled(job, text):
    """Check that stderr has only this text, in one line at the start and one line at the end."""
    first, last = job.stderr.splitlines()
    assert first.startswith(f"[EfficientLLM] no metrics, training goes on: {text}")
    assert last.startswith(f"[EfficientLLM] this job ran without metrics: {text}")


# --- settings ---


@pytest.mark.parametrize(
    ("name", "wrong", "allowed"),
    [
        ("tags", "team=a b", "at most 16 words or name=value, each name once, separated by commas"),
        ("run_name", "../x", "at most 100 letters, digits, '.', '_' and '-', beginning with a letter or digit"),
        ("run_name", "/tmp/x", "at most 100 letters, digits, '.', '_' and '-', beginning with a letter or digit"),
        ("run_name", "..", "at most 100 letters, digits, '.', '_' and '-', beginning with a letter or digit"),
        ("sinks", "console,../x", "none, or different names of files in effllm/sinks/, separated by commas"),
        ("device", "../nvml", "auto, or the name of a file in effllm/devices/"),
        ("endpoint", "here", "host:port or tcp://host:port"),
        ("endpoint", "tcp://127.0.0.1:99999", "host:port or tcp://host:port"),
        ("min_coverage", "1.5", "a ratio from 0 to 1"),
        ("warmup", "-1", "a whole number of iterations, such as 100, or a number of seconds, such as 60s"),
        ("parameters", "some", "total, trainable or active"),
    ],
)
def test_wrong_setting_is_reported_with_the_allowed_values(launch, name, wrong, allowed):
    job = launch.python(LOOP, "--iterations", 3, **{name: wrong}).done()

    assert_disabled(job, f"EFFICIENTLLM_{name.upper()}='{wrong}' is not usable: must be {allowed}")
    assert len(job.output()["steps"]) == 3
    assert not job.runs()


def test_wrong_setting_is_reported_only_by_rank_0(launch):
    job = launch.python(LOOP, "--iterations", 3, environ=jobs.rank_environ(1, 2), log_interval=0).done()

    assert (job.stdout, job.stderr) == ("", "")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE"),
    ],
)
def test_impossible_launcher_variables_disable_only_metrics(launch, variables, named):
    job = launch.python(LOOP, "--iterations", 3, environ=variables).done()

    assert_disabled(job, f"{named}=")


@pytest.mark.parametrize(
    "arguments", ["collection_interval='often'", "collection_interval=0", "collection_interval=float('nan')"]
)
def test_wrong_argument_is_reported_like_a_wrong_setting(launch, arguments):
    job = launch.code(
        f"import effllm\neffllm.initialize_efficientllm_metrics(5, {arguments})\nprint('trained')\n"
    ).done()

    assert job.stdout == "trained\n"
    assert_disabled(job, "collection_interval=")


def test_old_setting_name_disables_metrics_and_shows_the_new_name(launch):
    job = launch.python(LOOP, "--iterations", 3, warmup_seconds=60).done()

    assert_disabled(job, "EFFICIENTLLM_WARMUP_SECONDS='60' is not usable: write EFFICIENTLLM_WARMUP=60s instead")
    assert len(job.output()["steps"]) == 3


def test_unknown_sink_or_unknown_option_does_not_affect_other_sinks(launch):
    job = launch.python(*SERVED, sinks="nosuch,tensorboard:where=x,console").done()

    assert len(job.blocks) == 2
    assert any("has no option 'where'; available options: dir" in text for text in job.ledger.event_texts("sink"))
    assert any("there is no sink 'nosuch'" in text for text in job.ledger.event_texts("sink"))
    assert job.ledger.summary.tokens == 2000


def test_time_and_tokens_are_measured_with_an_unknown_device(launch):
    job = launch.python(*SERVED, device="nosuch").done()

    assert any("there is no device 'nosuch'" in text for text in job.ledger.event_texts("agent"))
    assert job.ledger.summary.tokens == 2000
    assert {"al_seconds", "tt_tokens_per_param_per_sec"} <= set(job.ledger.summary.metrics)
    assert "amu_gb" not in job.ledger.summary.metrics


# --- folders ---


def test_run_folder_that_cannot_be_created_is_reported_once(launch, tmp_path):
    (tmp_path / "file").touch()
    job = launch.python(LOOP, run_dir=tmp_path / "file" / "runs").done()

    assert [block["iteration"] for block in job.blocks] == ["10", "20"]
    assert job.stdout.count("set EFFICIENTLLM_RUN_DIR") >= 1
    assert job.stdout.count("cannot be written (Not a directory)") == 1
    assert "[EfficientLLM] Run completed" in job.stdout
    assert len(job.output()["steps"]) == 20


@pytest.mark.parametrize("name", ["lock", "events.jsonl", "windows-0001.jsonl", "ranks-0001.jsonl", "summary.json"])
def test_symlink_instead_of_a_file_is_not_followed(launch, tmp_path, name):
    folder, precious = tmp_path / "runs" / "mine", tmp_path / "precious"
    folder.mkdir(parents=True)
    precious.write_text("precious\n")
    (folder / name).symlink_to(precious)
    job = launch.python(LOOP, run_name="mine").done()

    assert precious.read_text() == "precious\n"
    assert len(job.blocks) == 2


def test_link_to_a_run_folder_is_followed(launch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(tmp_path / "elsewhere")
    launch.python(*SERVED, run_name="mine").done()

    assert jobs.Ledger(tmp_path / "elsewhere").summary.tokens == 2000


def test_folder_of_another_running_job_is_not_used(launch):
    first = launch.python(LOOP, "--until", "enough", run_name="shared")
    jobs.until(lambda: first.num_windows)
    second = launch.python(LOOP, "--until", "enough", run_name="shared")
    # The second job tries to lock the folder for six seconds.
    jobs.until(lambda: len(first.runs()) == 2 and jobs.Ledger(first.runs()[1]).num_windows)
    counts = [first.finish(), second.finish()]

    assert "another run is writing" in second.stdout
    assert [folder.name for folder in first.runs()] == ["shared", "shared-2"]
    assert [jobs.Ledger(folder).summary.iterations for folder in first.runs()] == counts


def test_totals_start_at_zero_after_an_invalid_state_file(launch, tmp_path):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text('{"attempt": "many"}')
    job = launch.python(*SERVED, run_name="mine").done()

    assert job.ledger.summary.tokens == 2000
    assert any("cannot be read, so all totals start at 0" in text for text in job.ledger.event_texts("sink"))


# --- addresses ---


def test_endpoint_without_a_listener_is_reported_in_one_line(launch):
    endpoint = f"127.0.0.1:{jobs.unused_port()}"
    job = launch.python(LOOP, endpoint=endpoint).done()

    assert len(job.output()["steps"]) == 20
    assert job.max_step_s() < 1.0
    assert job.our_errors == [f"[EfficientLLM] rank 0: 3 reports could not be delivered to tcp://{endpoint}"]
    assert (
        time.monotonic() - job.output()["steps"][-1][1] < 20
    )  # the trainer waits five seconds for the summary; the agent tries to send for four seconds
    assert not job.runs()


def test_endpoint_that_never_answers_is_reported_in_one_line(launch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        job = launch.python(LOOP, endpoint=f"127.0.0.1:{listener.getsockname()[1]}").done()

    assert len(job.output()["steps"]) == 20
    assert len(job.our_errors) == 1


@pytest.mark.parametrize("endpoint", ["192.0.2.1:5555", "somewhere.example:5555", "[2001:db8::1]:5555"])
def test_remote_endpoint_without_a_secret_is_rejected(launch, endpoint):
    job = launch.python(LOOP, "--iterations", 3, endpoint=endpoint).done()

    assert_disabled(job, "there is no secret ")


def test_multi_host_job_with_a_readable_secret_is_rejected(launch, tmp_path):
    (tmp_path / "secret").write_text("a" * 64)
    (tmp_path / "secret").chmod(0o644)
    environ = {**jobs.rank_environ(0, 2), "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    job = launch.code(
        "import sys, types\n"  # a fake of torchrun's store, which the test does not use
        "sys.modules['torch'] = types.SimpleNamespace(distributed=types.SimpleNamespace(TCPStore=None))\n"
        "import effllm\neffllm.initialize_efficientllm_metrics(5)\nprint('trained')\n",
        environ=environ,
        secret_file=tmp_path / "secret",
        interface="lo",
    ).done()

    assert job.stdout == "trained\n"
    assert_disabled(
        job,
        f"the secret {tmp_path}/secret can be read by other users: replace the secret if another user may have read "
        f"it, and chmod 600 {tmp_path}/secret",
    )


@pytest.mark.parametrize(("rank", "lines"), [(0, 2), (1, 0)])
def test_ranks_without_torch_or_endpoint_train_without_metrics(launch, rank, lines):
    environ = {**jobs.rank_environ(rank, 2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(jobs.unused_port())}
    job = launch.python(LOOP, "--iterations", 20, environ=environ).done()

    assert len(job.output()["steps"]) == 20
    assert job.stderr.count("torchrun's store needs torch: import torch first, or set EFFICIENTLLM_ENDPOINT") == lines
    assert job.stderr.count("\n") == lines


# --- the aggregator's port ---


def row(**changes):
    values = {
        "agent": "unknown", "sequence": 1, "rank": 0, "window": 1, "iteration_first": 1, "iteration_last": 10,
        "iteration_shown": 10, "start_time_s": 1.0, "end_time_s": 2.0, "wall_s": 1.0, "busy_s": 1.0, "wait_s": 0.0,
        "phases_s": {}, "tokens": 10**9, "tokens_processed": 10**9, "tokens_loss": 0, "samples": 10**6,
    }  # fmt: skip
    return RankReport(**{**values, **changes})


def hello(**changes):
    values = {
        "job": "", "agent": "unknown", "rank": 0, "local_rank": 0, "world_size": 1, "host": "elsewhere", "role": "x",
        "devices": (Device("GPU-x", "nvml"),), "parameters": ParameterCount(7), "log_interval": 10,
    }  # fmt: skip
    return Hello(**{**values, **changes})


UNKNOWN_PEERS = {
    "nothing": b"",
    "random bytes": os.urandom(500),
    "our magic and nothing": MAGIC,
    "our magic and random bytes": MAGIC + b"\xc1" + os.urandom(100),
    "another version": b"EFL9" + encode(hello())[4:],
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "deep nesting": MAGIC + b"\x91" * 50_000,
    "a message of no type": MAGIC + msgspec.msgpack.encode([99, 1, 2]),
    "an aggregator's message": MAGIC + msgspec.msgpack.encode([7, 10**9]),
    "too few fields": MAGIC + msgspec.msgpack.encode([2]),
    "a large message": MAGIC + b"\0" * 200_000,
    "too large a message": MAGIC + b"\0" * 600_000,
    "negative tokens": encode(Reports((row(tokens=-1),))),
    "a time of nan": encode(Reports((row(busy_s=math.nan),))),
    "a row of another agent's rank": encode(Reports((row(),))),
    "a row of no rank": encode(Reports((row(rank=10**6),))),
    "a heartbeat of an unknown agent": encode(Heartbeat("unknown", 0, 1, "x", 0.0)),
    "a bye of an unknown agent": encode(Bye("unknown", 0, "completed", 1)),
    "an event of an unknown agent": encode(AgentEvent("unknown", 0, Event(0.0, "agent", "nonsense \x1b[31m"))),
    "an agent for a rank that has one": encode(hello()),
    "a rank outside the world": encode(hello(rank=5)),
    "another world": encode(hello(rank=1, world_size=2)),
    "a world without end": encode(hello(rank=1, world_size=2**62)),
    "another interval": encode(hello(log_interval=7)),
}


def send_raw_bytes(port):
    """Connect without ZeroMQ: send half a greeting and stay connected, send HTTP requests, and reset a connection."""
    held = socket.create_connection(("127.0.0.1", port))
    held.sendall(b"\xff\0\0\0")
    with socket.create_connection(("127.0.0.1", port)) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    with socket.create_connection(("127.0.0.1", port)) as reset:
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        reset.sendall(os.urandom(4000))
    return held


def send_frames(port, frames):
    context = zmq.Context()
    for frame in frames:
        with context.socket(zmq.DEALER) as peer:
            peer.set(zmq.LINGER, 5000)
            peer.connect(f"tcp://127.0.0.1:{port}")
            peer.send(frame)
            peer.send_multipart([frame, b"more", b""])
    context.term()


def test_hostile_bytes_at_the_port_do_not_affect_a_running_job(launch):
    aggregator = launch.aggregator()
    ledger = aggregator.ledger
    rank = launch.python(LOOP, "--until", "enough", endpoint=aggregator.endpoint)
    jobs.until(lambda: ledger.num_windows)
    with send_raw_bytes(aggregator.port):
        send_frames(aggregator.port, UNKNOWN_PEERS.values())
        for reason in (
            "rank 0 already has an agent",
            "lies outside a world",
            "LOG_INTERVAL is 7 for this rank, but 10 for the job",
        ):
            jobs.until(lambda reason=reason: any(reason in text for text in ledger.event_texts("rejected")))
        jobs.until(lambda: len(ledger.event_texts("garbage")) >= 5)
        count = rank.finish()
        assert not aggregator.job.left()
    summary = ledger.summary

    assert (summary.status, summary.iterations) == ("completed", count)
    assert (summary.tokens, summary.samples) == (100 * count, 2 * count)
    assert (summary.parameters, summary.coverage.ranks_expected, summary.attempts) == (1000, 1, 1)
    assert list(summary.energy.by_device) == [ledger.ranks[0].device]
    assert "GPU-x" not in ledger.summary.energy.by_device
    assert rank.max_step_s() < 1.0
    assert "\x1b[31m" not in aggregator.job.stdout


def test_huge_world_size_is_rejected_without_using_memory(launch):
    aggregator = launch.aggregator()
    send_frames(aggregator.port, [encode(hello(world_size=2**40))])
    launch.python(LOOP, endpoint=aggregator.endpoint).done()
    assert not aggregator.job.left()

    assert aggregator.ledger.summary.tokens == 2000
    assert any(
        "a world of 1099511627776 ranks exceeds the limit" in text for text in aggregator.ledger.event_texts("rejected")
    )


# --- calls of the loop ---

CALLS = """
import math, os, pathlib, time
import effllm.efficientllm_metrics as effllm
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
until_s = time.monotonic() + 60
while not any(pathlib.Path(os.environ["EFFICIENTLLM_RUN_DIR"]).glob("*/run.json")):
    assert time.monotonic() < until_s, "there is no run folder"
    time.sleep(0.02)
def step(*counts, **named):
    collector.record_iteration_start()
    time.sleep(0.002)
    collector.record_iteration_end(*counts, **named)
{body}
effllm.finalize_efficientllm_metrics()
print("trained")
"""


def loop(launch, body, **settings):
    job = launch.code(CALLS.format(body=body), **{"log_interval": 5, **settings}).done()
    assert (
        "trained" in job.stdout.splitlines()
    )  # the script waits at most five seconds for the summary, so "trained" may not be the last line
    assert job.stderr == ""
    return job


@pytest.mark.parametrize(
    "wrong",
    [
        "-1, 1",
        "10, -1",
        "'ten', 1",
        "math.nan, 1",
        "math.inf, 1",
        "2**70, 1",
        "10, 2**63",
        "[1], 1",
        "10, 1, tokens=-5",
    ],
)
def test_invalid_counts_are_reported_once_and_ignored(launch, wrong):
    job = loop(launch, f"for i in range(10):\n    step(10, 1)\n    step({wrong})")

    assert (job.ledger.summary.tokens, job.ledger.summary.samples, job.ledger.summary.iterations) == (100, 10, 20)
    (text,) = job.ledger.event_texts("warning")
    assert "tokens and samples must be counts of at least 0; iteration 2 has no counts" in text


@pytest.mark.parametrize("loss", ["math.nan", "math.inf", "-math.inf", "1e400", "None", "'low'", "[1, 2]", "object()"])
def test_loss_that_is_not_a_number_is_not_shown(launch, loss):
    job = loop(launch, f"for i in range(1, 21):\n    step(10, 1)\n    collector.log_metrics(i, {loss})")

    assert [block["iteration"] for block in job.blocks] == ["5", "10", "15", "20"]
    assert [block["loss"] for block in job.blocks] == [None] * 4
    assert (job.ledger.summary.status, job.ledger.summary.tokens) == ("completed", 200)


@pytest.mark.parametrize("loss", ["'2.5'", "fractions.Fraction(5, 2)", "decimal.Decimal('2.5')"])
def test_loss_that_can_be_converted_to_a_number_is_shown(launch, loss):
    job = loop(
        launch,
        f"import fractions, decimal\nfor i in range(1, 11):\n    step(10, 1)\n    collector.log_metrics(i, {loss})",
    )

    assert {block["loss"] for block in job.blocks} == {"2.500000"}


def test_decreasing_iteration_number_causes_one_warning(launch):
    job = loop(
        launch,
        "for i in range(1, 21):\n    step(10, 1)\n    collector.log_metrics(i if i <= 10 else i - 8, 1.0)",
    )

    assert (job.ledger.summary.iterations, job.ledger.summary.tokens) == (20, 200)
    (text,) = job.ledger.event_texts("warning")
    assert "the iteration number decreased from 10 to 3; counting continues" in text


def test_invalid_iteration_numbers_are_ignored(launch):
    job = loop(
        launch, "for i in [None, 'x', 2**80, math.nan, -2**80]:\n    step(10, 1)\n    collector.log_metrics(i, 1.0)"
    )

    assert (job.ledger.summary.iterations, job.ledger.summary.tokens) == (5, 50)
    assert job.blocks[0]["iteration"] == "5"


def test_second_call_of_initialize_updates_the_settings(launch):
    job = loop(
        launch,
        "effllm.initialize_efficientllm_metrics(2000, facts={'model': 'small'})\nfor i in range(10):\n    step(10, 1)",
    )

    assert job.stdout.count("Metrics collection initialized") == 1
    assert job.ledger.summary.parameters == 2000
    assert job.ledger.facts["model"] == "small"
    assert len(job.runs()) == 1


def test_iteration_end_without_a_start_causes_one_warning(launch):
    job = loop(
        launch,
        "for i in range(10):\n    collector.record_iteration_end(10, 1)\n"
        "collector.record_iteration_start()\nstep(10, 1)\ncollector.record_iteration_start()",
    )

    assert (job.ledger.summary.iterations, job.ledger.summary.tokens) == (11, 110)
    (text,) = job.ledger.event_texts("warning")
    assert "an iteration ended without a start" in text


def test_calls_after_finalize_do_nothing(launch):
    job = loop(
        launch,
        "for i in range(10):\n    step(10, 1)\n"
        "effllm.finalize_efficientllm_metrics()\neffllm.finalize_efficientllm_metrics()\n"
        "step(1000, 1000)\ncollector.log_metrics(11, 1.0)\ncollector.reset()\n"
        "with collector.phase('evaluation'):\n    pass",
    )

    assert job.stdout.count("[EfficientLLM] Run completed") == 1
    assert job.ledger.summary.tokens == 100


def test_finalize_without_initialize_prints_nothing(launch):
    job = launch.code("import effllm\neffllm.finalize_efficientllm_metrics()\n").done()

    assert (job.stdout, job.stderr) == ("", "")


def test_times_of_overlapping_and_unknown_phases_add_up_to_wall_time(launch):
    job = loop(
        launch,
        "whole = collector.phase('evaluation')\nwhole.__enter__()\nstep(10, 1)\nwhole.__exit__(None, None, None)\n"
        "with collector.phase('checkpoint'), collector.phase('evaluation'):\n    time.sleep(0.02)\n"
        "with collector.phase(None), collector.phase('lunch'):\n    time.sleep(0.02)\n"
        "step(10, 1)\nleft_open = collector.phase('evaluation')\nleft_open.__enter__()\n",
    )

    assert job.ledger.summary.tokens == 20
    for one in job.ledger.ranks:
        assert one.wall_s == pytest.approx(one.busy_s + one.wait_s + sum(one.phases_s.values()), abs=1e-6)
    assert {"evaluation", "checkpoint", "other"} <= set(job.ledger.summary.time_by_class)


@pytest.mark.parametrize("parameters", ["0", "-5", "'many'", "math.nan", "2**70", "None", "1.5e3"])
def test_tt_and_st_are_missing_without_a_valid_parameter_count(launch, parameters):
    job = loop(launch, f"collector.set_model_parameters({parameters})\nfor i in range(10):\n    step(10, 1)")
    known = parameters == "1.5e3"

    assert ("tt_tokens_per_param_per_sec" in job.ledger.summary.metrics) is known
    assert job.ledger.summary.parameters == (1500 if known else None)
    assert job.ledger.summary.tokens == 100


@pytest.mark.parametrize(
    "arguments",
    [
        "facts={'folder': __import__('pathlib').Path('/'), 'odd': {1, 2}, 3: object(), 'nan': math.nan}",
        "facts={'long': 'x' * 200_000}",
        "flops_per_token='many'",
        "first_iteration='three'",
        "first_iteration=-3",
        "total_iterations='all'",
    ],
)
def test_facts_with_invalid_values_do_not_disable_metrics(launch, arguments):
    job = launch.code(
        "import math\nimport effllm.efficientllm_metrics as effllm\n"
        f"effllm.initialize_efficientllm_metrics(1000, {arguments})\n"
        "collector = effllm.get_metrics_collector()\n"
        "for i in range(10):\n    collector.record_iteration_start()\n    collector.record_iteration_end(10, 1)\n"
        "effllm.finalize_efficientllm_metrics()\n"
    ).done()

    assert job.ledger.summary.tokens == 100
    assert job.stderr == ""


FAST = """
import effllm.efficientllm_metrics as effllm
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for i in range(50_000):
    collector.record_iteration_start()
    collector.record_iteration_end(3, 1)
effllm.finalize_efficientllm_metrics()
"""


@pytest.mark.parametrize("history_size", [16, 1000])
def test_full_ring_loses_records_but_no_iterations_or_tokens(launch, history_size):
    job = launch.code(FAST, history_size=history_size, log_interval=10_000).done()
    summary, rows = job.ledger.summary, job.ledger.ranks

    assert (summary.iterations, summary.tokens, summary.samples) == (50_000, 150_000, 50_000)
    assert summary.status == "completed"
    assert sum(row.iteration_last - row.iteration_first + 1 for row in rows) == 50_000
    assert max(row.iterations_overrun for row in rows) > 0
    assert summary.coverage.reports_lost == 0


def test_all_windows_are_written_if_they_exceed_the_queue_of_a_sink(launch):
    job = launch.code(FAST, history_size=10_000, log_interval=50, sinks="console").done()
    summary = job.ledger.summary

    assert summary.status == "completed"
    assert summary.iterations == 50_000
    assert len(job.ledger.windows) == len(job.ledger.ranks) > 100
    assert sum(row.tokens for row in job.ledger.ranks) == summary.tokens == 150_000
    assert summary.coverage.reports_lost == 0
    assert not job.ledger.event_texts("sink")


def test_writer_that_raises_does_not_end_the_loop(launch):
    job = loop(
        launch,
        "i, calls = 0, []\nclass Writer:\n"
        "    def add_scalar(self, *_):\n        calls.append(1)\n        raise OSError('full')\n"
        "while not calls and i < 3000:\n    i += 1\n    step(10, 1)\n    time.sleep(0.01)\n"
        "    collector.log_metrics(i, 1.0, Writer())",
    )

    assert job.ledger.summary.tokens == 10 * job.ledger.summary.iterations
    assert any(
        "the writer given to log_metrics failed: OSError: full" in text for text in job.ledger.event_texts("warning")
    )


TENSORS = """
import torch
for i in range(1, 11):
    step(torch.tensor(10), torch.tensor(1))
    collector.log_metrics(i, torch.tensor(2.5))
for i in range(11, 21):
    step(torch.tensor([1, 2]), 1)
    collector.log_metrics(i, torch.tensor([1.0, 2.0]))
"""


@pytest.mark.torch
@jobs.skip_without_torch
def test_tensors_of_one_element_are_accepted_as_numbers(launch):
    job = loop(launch, TENSORS)

    assert (job.ledger.summary.tokens, job.ledger.summary.iterations) == (100, 20)
    assert [block["loss"] for block in job.blocks] == ["2.500000", "2.500000", None, None]


TWO_RUNS = """
import json, time
import effllm
class Writer(dict):
    def add_scalar(self, tag, value, step):
        self[tag.removeprefix("efficientllm/")] = value
for _ in range(2):
    effllm.initialize_efficientllm_metrics(1000)
    collector = effllm.get_metrics_collector()
    for _ in range(5):
        collector.record_iteration_start()
        collector.record_iteration_end(10, 1)
    writer = Writer()
    deadline_s = time.monotonic() + 60
    while not writer and time.monotonic() < deadline_s:
        time.sleep(0.02)
        collector.log_metrics(5, None, writer)
    effllm.finalize_efficientllm_metrics()
    print("written", json.dumps(writer))
"""


def test_values_of_two_runs_in_one_process_are_not_mixed(launch):
    job = launch.code(TWO_RUNS, log_interval=5).done()

    written = [json.loads(line.split(maxsplit=1)[1]) for line in job.stdout.splitlines() if line.startswith("written")]
    runs = sorted(map(jobs.Ledger, job.runs()), key=lambda run: run.summary.started_time_s)
    for values, run in zip(written, runs, strict=True):
        reported = [{tag: one.values[tag] for tag in jobs.FORMATS if tag in one.values} for one in run.windows]
        assert {tag: jobs.in_lines(value) for tag, value in values.items()} in reported
    assert written[0] != written[1]
