"""The command effllm serve: a separate aggregator, with a training loop in another process."""

import signal
import socket
import subprocess
import sys
import time

import jobs
import pytest
from builders import hello
from cli_process import read_until

from effllm.network.transport import Link, make_context
from effllm.records.wire import Bye, ByeSeen

SINKS = {"EFFICIENTLLM_SINKS": "console"}

LOOP = """
import effllm
with effllm.monitor(parameters=1000) as m:
    for _ in range(20):
        m.iteration(tokens=100, samples=2, loss=1.5)
"""


def ready(process):
    """Return the endpoint that the started aggregator prints."""
    line = read_until(process, "EFFICIENTLLM_ENDPOINT=")[-1]
    return line.strip().removeprefix("export EFFICIENTLLM_ENDPOINT=")


def train(cli, endpoint):
    environ = cli.environ(EFFICIENTLLM_ENDPOINT=endpoint, EFFICIENTLLM_DEVICE="simulated")
    return subprocess.run([sys.executable, "-c", LOOP], env=environ, capture_output=True, text=True, timeout=100)


def test_serve_receives_reports_and_ends_with_the_loop(cli):
    process = cli.start("serve", "--run-dir", "runs", "--run-name", "one", **SINKS)

    done = train(cli, ready(process))

    shown, _ = process.communicate(timeout=60)
    assert (done.returncode, done.stderr, process.returncode) == (0, "", 0)
    assert "[EfficientLLM Metrics] Iteration 20:" in shown
    summary = cli.summary("runs")
    assert (summary["status"], summary["tokens"], summary["simulated"]) == ("completed", 2000, True)
    assert (cli.folder / "runs" / "one" / "summary.json").exists()


def test_agent_that_reads_after_the_end_of_the_job_receives_the_confirmation(cli):
    process = cli.start("serve", "--run-dir", "runs", EFFICIENTLLM_SECURITY="none", EFFICIENTLLM_SINKS="none")
    context = make_context()
    link = Link(context, ready(process))
    link.connect()
    jobs.until(lambda: link.send(hello(0, 1)))
    jobs.until(link.receive)

    link.send(Bye("agent-0", 0, "completed", 0))
    time.sleep(0.4)  # as on a busy host; without a wait the aggregator ends within 0.02 s

    assert ByeSeen(0) in link.receive()
    link.close()
    process.communicate(timeout=60)
    context.destroy(linger=0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_without_ranks_leaves_no_run_folder_and_keeps_an_existing_one(cli, number):
    mine = cli.folder / "efficientllm_runs" / "mine"
    mine.mkdir(parents=True, mode=0o700)
    (mine / "notes.txt").write_text("mine")
    process = cli.start("serve", *(["--run-name", "mine"] if number == signal.SIGTERM else []))
    ready(process)
    process.send_signal(number)

    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert shown.splitlines()[-1].startswith("effllm serve: ended before any rank connected; there is no run folder")
    assert "Run killed" not in shown
    assert list((cli.folder / "efficientllm_runs").iterdir()) == [mine]
    assert (mine / "notes.txt").read_text() == "mine"


def test_port_in_use_prints_one_line_and_exits_with_status_1(cli):
    with socket.create_server(("127.0.0.1", 0)) as other:
        bind = f"127.0.0.1:{other.getsockname()[1]}"
        done = cli.run("serve", "--bind", bind)

    reason = f"cannot listen on tcp://{bind}: Address already in use"
    line = f"effllm serve: {reason}; choose another port, or 0 for any free port\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)
    assert not (cli.folder / "efficientllm_runs").exists()


NO_SECRET, NO_SINK = {"EFFICIENTLLM_SECRET_FILE": "/dev/null"}, {"EFFICIENTLLM_SINKS": "consol"}
