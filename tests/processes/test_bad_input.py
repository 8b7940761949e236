"""Bad input has a defined result and one clear line; measurements are kept and training is not affected."""

import json
import os
import socket
import subprocess
import sys
import time

import builders
import jobs
import pytest
import zmq

from effllm.network.transport import MAGIC, encode
from effllm.records.rank import Event, ParameterCount
from effllm.records.wire import AgentEvent, Bye, Heartbeat, Reports

LOOP = "loop.py"
# --- settings ---


NAME = "at most 100 letters, digits, '.', '_' and '-', beginning with a letter or digit"
WRONG_SETTINGS = [
    ("METRICS_ENABLED", "flase", "true, 1, yes or on, or false, 0, no or off"),
    ("RUN_NAME", "../x", NAME),
    ("ENDPOINT", "tcp://127.0.0.1:99999", "host:port or tcp://host:port"),
]
#: Variables of the environment, further arguments of the call, and the beginning of the reason on stderr.
WITHOUT_METRICS = [
    *(
        ({f"EFFICIENTLLM_{name}": wrong}, "", f"EFFICIENTLLM_{name}='{wrong}' is not usable: must be {allowed}")
        for name, wrong, allowed in WRONG_SETTINGS
    ),
    ({"EFFICIENTLLM_ENDPOINT": "192.0.2.1:5555"}, "", "there is no secret "),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "", "RANK="),
    *(({"RANK": "0", "WORLD_SIZE": wrong}, "", f"WORLD_SIZE='{wrong}' is not usable") for wrong in ("-1", "many")),
    ({}, "collection_interval=float('nan')", "collection_interval="),
]
TRAINING = """
os.environ.update({variables})
print("TRAINING", file=sys.stderr, flush=True)
effllm.initialize_efficientllm_metrics(5, {arguments})
for i in range(1, 4):
    collector = effllm.get_metrics_collector()
    collector.record_iteration_start()
    collector.record_iteration_end(10, 1)
    collector.log_metrics(i, 1.0)
effllm.finalize_efficientllm_metrics()
os.environ.clear()
os.environ.update(before)
"""


def trainings(launch, runs):
    """Train three iterations in one process for each pair of variables and arguments; return the lines of each run."""
    code = "import os, sys\nimport effllm.efficientllm_metrics as effllm\nbefore = dict(os.environ)\n"
    code += "".join(TRAINING.format(variables=variables, arguments=arguments) for variables, arguments in runs)
    job = launch.code(code + "print('trained')\n").done()
    assert (job.stdout, job.runs()) == ("trained\n", [])
    head, *texts = job.stderr.split("TRAINING\n")
    assert (head, len(texts)) == ("", len(runs))
    return [text.splitlines() for text in texts]


def test_wrong_values_give_one_line_with_the_allowed_values_at_the_start_and_at_the_end(launch):
    *others, last = trainings(launch, [(variables, arguments) for variables, arguments, _ in WITHOUT_METRICS])
    reasons = [f"[EfficientLLM] no metrics, training goes on: {reason}" for *_, reason in WITHOUT_METRICS]

    assert [len(lines) for lines in others] == [1] * len(others)
    assert [line for (line,), reason in zip(others, reasons, strict=False) if not line.startswith(reason)] == []
    assert last[0].startswith(reasons[-1])
    assert last[1].startswith("[EfficientLLM] this job ran without metrics: collection_interval=")
    assert len(last) == 2


def test_reasons_are_reported_only_by_rank_0(launch):
    unused = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(jobs.unused_port())}
    runs = [{**jobs.rank_environ(1, 2), "EFFICIENTLLM_LOG_INTERVAL": "0"}]
    runs += [{**jobs.rank_environ(rank, 2), **unused} for rank in (1, 0)]
    *others, last = trainings(launch, [(variables, "") for variables in runs])
    reason = "torchrun's store needs torch: import torch first, or set EFFICIENTLLM_ENDPOINT"

    assert others == [[], []]
    assert [reason in line for line in last] == [True, True]


# --- folders ---


def test_wrong_sinks_device_and_state_do_not_affect_counts_in_a_linked_run_folder(launch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "state.json").write_text('{"attempt": "many"}')
    sinks = "nosuch,tensorboard:where=x,console"
    job = launch.python(LOOP, "--served", run_name="mine", sinks=sinks, device="nosuch").done()
    ledger = jobs.Ledger(tmp_path / "elsewhere")

    assert len(job.blocks) == 2
    for text in (
        "has no option 'where'; available options: dir",
        "there is no sink 'nosuch'",
        "cannot be read, so all totals start at 0",
    ):
        assert any(text in found for found in ledger.event_texts("sink")), text
    assert any("there is no device 'nosuch'" in text for text in ledger.event_texts("agent"))
    assert ledger.summary.tokens == 2000
    assert {"al_seconds", "tt_tokens_per_param_per_sec"} <= set(ledger.summary.metrics)
    assert "amu_gb" not in ledger.summary.metrics


def test_run_folder_that_cannot_be_created_is_reported_once(launch, tmp_path):
    (tmp_path / "file").touch()
    job = launch.python(LOOP, run_dir=tmp_path / "file" / "runs").done()

    assert [block["iteration"] for block in job.blocks] == ["10", "20"]
    assert job.stdout.count("set EFFICIENTLLM_RUN_DIR") >= 1
    assert job.stdout.count("cannot be written (Not a directory)") == 1
    assert "[EfficientLLM] Run completed" in job.stdout
    assert len(job.output()["steps"]) == 20


def test_symlinks_instead_of_files_are_not_followed(launch, tmp_path):
    folder, precious = tmp_path / "runs" / "mine", tmp_path / "precious"
    folder.mkdir(parents=True)
    precious.write_text("precious\n")
    for name in ("events.jsonl", "windows-0001.jsonl", "ranks-0001.jsonl", "summary.json"):
        (folder / name).symlink_to(precious)
    job = launch.python(LOOP, run_name="mine").done()

    assert precious.read_text() == "precious\n"
    assert len(job.blocks) == 2


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


# --- addresses ---


@pytest.mark.parametrize("listens", [False, True])
def test_endpoint_that_never_answers_is_reported_in_one_line(launch, listens):
    with socket.socket() as socket_:
        socket_.bind(("127.0.0.1", 0))
        if listens:
            socket_.listen(8)
        job = launch.python(LOOP, endpoint=f"127.0.0.1:{socket_.getsockname()[1]}").wait()
        ended_s = time.monotonic()
        assert not job.left(within_s=60.0)

    assert (job.code, len(job.output()["steps"])) == (0, 20)
    assert job.max_step_s() < 1.0
    assert job.our_errors == [
        "[EfficientLLM] rank 0: no aggregator has answered yet: its reports are kept for up to 30 s after the job's end"
    ]
    assert ended_s - job.output()["steps"][-1][1] < 20  # the trainer waits five seconds for the summary
    assert not job.runs()


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
    first, last = job.stderr.splitlines()
    reason = f"the secret {tmp_path}/secret can be read by other users: replace the secret"
    assert first.startswith(f"[EfficientLLM] no metrics, training goes on: {reason}")
    assert last.startswith(f"[EfficientLLM] this job ran without metrics: {reason}")


# --- the aggregator's port ---


def row(**changes):
    return builders.row(agent="unknown", **{"tokens": 10**9, "tokens_processed": 10**9, "devices": (), **changes})


def hello(**changes):
    about = {"job": "", "agent": "unknown", "world_size": 1, "host": "elsewhere", "parameters": ParameterCount(7)}
    return builders.hello(**{**about, "devices": (builders.gpu("GPU-x"),), **changes})


UNKNOWN_PEERS = {
    "nothing": b"",
    "random bytes": os.urandom(500),
    "our magic and random bytes": MAGIC + b"\xc1" + os.urandom(100),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "deep nesting": MAGIC + b"\x91" * 50_000,
    "too large a message": MAGIC + b"\0" * 600_000,
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
    send_frames(aggregator.port, [encode(hello(world_size=2**40))])  # before the first rank
    rank = launch.python(LOOP, "--until", "enough", endpoint=aggregator.endpoint)
    jobs.until(lambda: ledger.num_windows)
    with send_raw_bytes(aggregator.port):
        send_frames(aggregator.port, UNKNOWN_PEERS.values())
        for reason in (
            "a world of 1099511627776 ranks exceeds the limit",
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
    assert rank.max_step_s() < 1.0
    assert "\x1b[31m" not in aggregator.job.stdout


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


NO_LOSSES = ["math.nan", "math.inf", "-math.inf", "1e400", "None", "'low'", "[1, 2]", "object()"]
LOSSES = ["'2.5'", "fractions.Fraction(5, 2)", "decimal.Decimal('2.5')"]
WRONG_CALLS = f"""
import decimal, fractions
collector.set_model_parameters("many")
for wrong in [(-1, 1), (10, -1), ("ten", 1), (math.nan, 1), (math.inf, 1), (2**70, 1), (10, 2**63), ([1], 1)]:
    step(10, 1)
    step(*wrong)
step(10, 1)
step(10, 1, tokens=-5)
step(10, 1)
step(10, 1)
i = 20
for loss in [{", ".join(NO_LOSSES + LOSSES)}]:
    for i in range(i + 1, i + 6):
        step(10, 1)
        collector.log_metrics(i, loss)
for wrong in [None, "x", 2**80, math.nan, -2**80]:
    step(10, 1)
    collector.log_metrics(wrong, 1.0)
for i in range(10):
    collector.record_iteration_end(10, 1)
collector.record_iteration_start()
step(10, 1)
collector.record_iteration_start()
whole = collector.phase("evaluation")
whole.__enter__()
step(10, 1)
whole.__exit__(None, None, None)
with collector.phase("checkpoint"), collector.phase("evaluation"):
    time.sleep(0.02)
with collector.phase(None), collector.phase("lunch"):
    time.sleep(0.02)
step(10, 1)
left_open = collector.phase("evaluation")
left_open.__enter__()
effllm.finalize_efficientllm_metrics()
effllm.finalize_efficientllm_metrics()
step(1000, 1000)
collector.log_metrics(114, 1.0)
collector.reset()
with collector.phase("evaluation"):
    pass
"""


def loop(launch, body, **settings):
    job = launch.code(CALLS.format(body=body), **{"log_interval": 5, **settings}).done()
    assert "trained" in job.stdout.splitlines()  # not always the last line: the summary may come later
    assert job.stderr == ""
    return job


@pytest.fixture(scope="module")
def wrong_calls(tmp_path_factory):
    """Return the job of a script with all wrong calls of the loop."""
    with jobs.launching(tmp_path_factory.mktemp("wrong_calls")) as launch:
        yield loop(launch, WRONG_CALLS)


def test_invalid_counts_are_ignored_and_all_others_are_added(wrong_calls):
    summary = wrong_calls.ledger.summary

    # The steps with invalid counts, with losses, with invalid numbers, without a start, with phases.
    assert summary.iterations == 20 + 5 * 11 + 5 + 11 + 2
    assert summary.measured_samples == 11 + 5 * 11 + 5 + 11 + 2
    assert summary.measured_tokens == 10 * summary.measured_samples
    assert (summary.status, summary.tokens, summary.samples) == ("completed", None, None)


def test_each_kind_of_wrong_call_causes_one_warning(wrong_calls):
    parts = [
        "tokens and samples must be counts of at least 0; iteration 2 has no counts",
        "log_metrics takes an iteration number and a loss that is a number; the loss is ignored",
        "log_metrics was given an iteration number out of range; the loss is ignored",
        "an iteration ended without a start",
    ]
    texts = wrong_calls.ledger.event_texts("warning")

    assert [part in text for part, text in zip(parts, texts, strict=True)] == [True] * 4


def test_loss_is_shown_if_it_can_be_converted_to_a_finite_number(wrong_calls):
    blocks = wrong_calls.blocks

    assert [block["iteration"] for block in blocks[:16]] == [str(5 * number) for number in range(1, 17)]
    assert [block["loss"] for block in blocks[4:15]] == [None] * len(NO_LOSSES) + ["2.500000"] * len(LOSSES)


def test_calls_after_finalize_do_nothing(wrong_calls):
    assert wrong_calls.stdout.count("[EfficientLLM] Run completed") == 1


def test_times_of_overlapping_and_unknown_phases_add_up_to_wall_time(wrong_calls):
    for one in wrong_calls.ledger.ranks:
        assert one.wall_s == pytest.approx(one.busy_s + one.wait_s + sum(one.phases_s.values()), abs=1e-6)
    assert {"evaluation", "checkpoint", "other"} <= set(wrong_calls.ledger.summary.time_by_class)


ODD_FACTS = """
import math, pathlib
import effllm.efficientllm_metrics as effllm
odd = {"folder": pathlib.Path("/"), "odd": {1, 2}, 3: object(), "nan": math.nan, "long": "x" * 200_000}
odd |= {f"arg_{i}": i for i in range(400)}
effllm.initialize_efficientllm_metrics(
    1000, facts=odd, flops_per_token="many", first_iteration="three", total_iterations="all"
)
effllm.initialize_efficientllm_metrics(2000, facts={"model": "small"}, first_iteration=-3)
collector = effllm.get_metrics_collector()
for i in range(1, 21):
    collector.record_iteration_start()
    collector.record_iteration_end(10, 1)
    collector.log_metrics(i if i <= 10 else i - 8, 1.0)
effllm.finalize_efficientllm_metrics()
"""


@pytest.fixture(scope="module")
def odd_facts(tmp_path_factory):
    """Return the job of a script with invalid facts, two calls of initialize and decreasing iteration numbers."""
    with jobs.launching(tmp_path_factory.mktemp("odd_facts")) as launch:
        yield launch.code(ODD_FACTS).done()


def test_facts_of_any_type_and_number_do_not_disable_metrics(odd_facts):
    facts = odd_facts.ledger.facts

    assert odd_facts.stderr == ""
    assert odd_facts.ledger.summary.tokens == 200
    assert (facts["folder"], facts["arg_399"], "long" in facts) == ("/", 399, False)
    assert "facts: 1 left out of run.json" in odd_facts.ledger.event_texts("warning")[0]


def test_second_call_of_initialize_updates_the_facts(odd_facts):
    assert odd_facts.stdout.count("[EfficientLLM] measuring ") == 1
    assert len(odd_facts.runs()) == 1
    assert odd_facts.ledger.summary.parameters == 2000
    assert odd_facts.ledger.facts["model"] == "small"


def test_decreasing_iteration_number_causes_one_warning(odd_facts):
    assert odd_facts.ledger.summary.iterations == 20
    (text,) = odd_facts.ledger.event_texts("warning")[1:]
    assert "the iteration number decreased from 10 to 3; counting continues" in text


def test_arguments_of_any_type_raise_nothing_and_end_no_metrics(launch):
    job = launch.python("absurd_arguments.py").done()

    assert job.output("raised.json") == []
    assert (job.ledger.summary.status, job.ledger.event_texts("garbage")) == ("completed", [])
    assert job.ledger.summary.measured_tokens >= 100 * 100


FAST = """
import effllm.efficientllm_metrics as effllm
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for i in range(50_000):
    collector.record_iteration_start()
    collector.record_iteration_end(3, 1)
effllm.finalize_efficientllm_metrics()
"""


def test_full_ring_loses_records_but_no_iterations_or_tokens(launch):
    job = launch.code(FAST, history_size=16, log_interval=10_000).done()
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


RAISES = """
i, calls = 0, []
class Writer:
    def add_scalar(self, *_):
        calls.append(1)
        raise OSError("full")
while not calls and i < 3000:
    i += 1
    step(10, 1)
    time.sleep(0.01)
    collector.log_metrics(i, 1.0, Writer())
"""


def test_writer_that_raises_does_not_end_the_loop(launch):
    job = loop(launch, RAISES)

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

    assert (job.ledger.summary.measured_tokens, job.ledger.summary.iterations) == (100, 20)
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


SHORT_LOOP = """
import effllm
collector = effllm.initialize_efficientllm_metrics(1000)
collector.record_iteration_start()
collector.record_iteration_end(100, 1)
print("trained", file=sys.stderr, flush=True)
"""
ATTACHED = "from effllm.attach import autoload; autoload()  # as torch does\n"


def stderr_of(cli, code, **variables):
    """Run a script in a new process; return the lines of its stderr."""
    path = cli.script("import os, sys\n" + code)
    done = subprocess.run(
        [sys.executable, path], env=cli.environ(**variables), cwd=cli.folder,
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stderr.splitlines()


@pytest.mark.parametrize("name", ["METRICS_ENABLED", "ATTACH"])
def test_invalid_value_of_a_switch_variable_is_reported_at_the_end(cli, name):
    [last] = stderr_of(cli, ATTACHED, **{f"EFFICIENTLLM_{name}": "perhaps"})

    assert last.startswith(f"[EfficientLLM] this job ran without metrics: EFFICIENTLLM_{name}='perhaps'")


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        (ATTACHED, {}),
        (ATTACHED, {"EFFICIENTLLM_METRICS_ENABLED": "off", "EFFICIENTLLM_ATTACH": "perhaps"}),
        (ATTACHED, {"EFFICIENTLLM_ATTACH": "perhaps", "RANK": "1", "WORLD_SIZE": "2"}),
        (ATTACHED + "os.close(2)", {"EFFICIENTLLM_ATTACH": "perhaps"}),
        (ATTACHED + "sys.modules['torch.distributed.launcher'] = sys", {"EFFICIENTLLM_ATTACH": "perhaps"}),
        (ATTACHED + "if os.fork(): os.wait(); os._exit(0)", {"EFFICIENTLLM_ATTACH": "perhaps"}),
    ],
    ids=["right", "off", "rank 1", "no stderr", "launcher", "forked"],
)
def test_process_without_a_wrong_setting_prints_no_line(cli, code, variables):
    assert stderr_of(cli, code, **variables) == []


def test_metrics_that_the_loop_starts_are_not_reported_as_missing(cli):
    lines = stderr_of(cli, ATTACHED + SHORT_LOOP, EFFICIENTLLM_ATTACH="perhaps", EFFICIENTLLM_SINKS="none")

    assert [line for line in lines if "ran without metrics" in line] == []
