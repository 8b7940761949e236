"""Scripts with libraries that replace parts of Python, with threads, with signal handlers, and without stdout."""

import sys

import pytest

LOOP = """
import effllm
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for _ in range(20):
    collector.record_iteration_start()
    time.sleep(0.005)
    collector.record_iteration_end(100, 2)
"""
END = "effllm.finalize_efficientllm_metrics()\n"


def test_metrics_start_without_select_poll(launch):
    job = launch.code(f"import select, time\ndel select.poll\n{LOOP}{END}").done()

    assert (job.ledger.summary.status, job.ledger.summary.tokens) == ("completed", 2000)


@pytest.mark.long
def test_end_with_a_frozen_clock_does_not_wait_for_a_stopped_agent(launch):
    """`Popen.wait` with a limit never returns: it reads the frozen clock."""
    freeze = "now_s = time.monotonic(); time.monotonic = time.time = subprocess._time = lambda: now_s\n"
    stop = "(agent,) = psutil.Process().children(); agent.suspend()\n"
    script = f"import subprocess, time, psutil\n{LOOP}{stop}{freeze}{END}print('ended'); agent.resume()\n"
    job = launch.code(script).done()

    assert "ended" in job.stdout
    assert job.ledger.summary.tokens == 2000


def test_threads_that_initialise_at_once_share_one_run(launch):
    start = """
import threading, time, effllm
threads = [threading.Thread(target=effllm.initialize_efficientllm_metrics, args=(1000,)) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()
"""
    job = launch.code(start + LOOP + END).done()

    assert len(job.runs()) == 1
    assert (job.ledger.summary.iterations, job.ledger.summary.tokens) == (20, 2000)


def test_signal_handler_that_records_makes_no_report_invalid(launch):
    script = """
import signal, time, effllm
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()

def record(*_):
    collector.record_iteration_end(100, 2)
    collector.log_metrics(5, 1.0)

signal.signal(signal.SIGALRM, record)
signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
until_s = time.monotonic() + 1.0
while time.monotonic() < until_s:
    collector.record_iteration_start()
    sum(range(2000))
    collector.record_iteration_end(100, 2)
signal.setitimer(signal.ITIMER_REAL, 0)
effllm.finalize_efficientllm_metrics()
"""
    job = launch.code(script, log_interval=500).done()

    assert job.ledger.event_texts("garbage") == []
    assert job.ledger.summary.iterations > 500
    assert job.ledger.summary.status == "completed"


def test_metrics_of_a_script_without_stdout_and_stderr(launch):
    """The first descriptors that the session opens would get the numbers of stdout and stderr."""
    job = launch.code(f"import os, time\nos.close(1); os.close(2)\n{LOOP}{END}").done()

    assert (job.ledger.summary.status, job.ledger.summary.tokens) == ("completed", 2000)
    (text,) = job.ledger.event_texts("warning")
    assert text.endswith("stdout or stderr is closed: metrics and warnings are only in the run folder")


def test_long_command_line_leaves_all_other_facts(launch):
    more = "import sys; sys.argv += ['--data', 'x' * 5000] + ['shard.bin'] * 10_000\n"
    job = launch.code(
        f"{more}import time\n{LOOP}{END}".replace("metrics(1000)", "metrics(1000, facts={'model': 'small'})")
    )

    facts = job.done().ledger.facts
    assert facts["model"] == "small"
    assert facts["command"][-1].endswith(" more words")
    assert sum(map(len, facts["command"])) < 10_000


@pytest.mark.parametrize("descriptor", ["None", "-1", "1 / 0"])
def test_a_stream_of_the_script_in_place_of_stdout_raises_nothing(launch, descriptor):
    """A program may put an object without a usable descriptor in the place of stdout."""
    stream = f"""
import io, sys, time
class Stream(io.StringIO):
    def fileno(self):
        return {descriptor}
sys.stdout = sys.stderr = Stream()
"""
    job = launch.code(f"{stream}{LOOP}{END}").done()

    assert (job.ledger.summary.status, job.ledger.summary.tokens) == ("completed", 2000)


def test_closed_stdin_is_no_reason_for_a_warning(launch):
    job = launch.code(f"import os, time\nos.close(0)\n{LOOP}{END}").done()

    assert job.ledger.event_texts("warning") == []


def test_files_with_the_numbers_of_stdout_and_stderr_get_no_line(launch):
    """A shell starts the script with closed stdout and stderr, so its first two files have the numbers 1 and 2."""
    job = launch._job()
    opened = "import time\nfiles = [open(f'file-{number}', 'w') for number in (1, 2)]\n"
    check = "assert [one.fileno() for one in files] == [1, 2]\nfor one in files: print('own', file=one)\n"
    (job.folder / "opens.py").write_text(opened + LOOP + check + END)
    close = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"]
    job.start([*close, sys.executable, "opens.py"], launch.environ({"log_interval": 5})).done()

    assert [(job.folder / f"file-{number}").read_text() for number in (1, 2)] == ["own\n", "own\n"]
    assert job.ledger.summary.tokens == 2000


def test_first_requests_of_two_threads_share_one_run(launch):
    script = """
import threading, effllm
together = threading.Barrier(2)
def ask():
    together.wait()
    with effllm.request() as request:
        request.generated(5)
threads = [threading.Thread(target=ask) for _ in range(2)]
for one in threads: one.start()
for one in threads: one.join()
"""
    job = launch.code(script).done()

    assert len(job.runs()) == 1
