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
#: An object without a usable descriptor in the place of stdout.
STREAM = """
import io, sys
class Stream(io.StringIO):
    def fileno(self):
        return {}
sys.stdout = sys.stderr = Stream()
"""
CLOSED = "stdout or stderr is closed: metrics and warnings are only in the run folder"
#: First lines of a script, and the end of its warning; the first open descriptors would be those of stdout and stderr.
BEGINNINGS = {
    "no select.poll": ("import select; del select.poll", ""),
    "no stdin": ("import os; os.close(0)", ""),
    "no stdout and stderr": ("import os; os.close(1); os.close(2)", CLOSED),
    **{f"fileno is {what}": (STREAM.format(what), None) for what in ("None", "-1", "1 / 0")},
}


@pytest.mark.parametrize(("first", "warning"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_an_unusual_beginning_does_not_affect_the_metrics(launch, first, warning):
    job = launch.code(f"import time\n{first}\n{LOOP}{END}").done()

    assert (job.ledger.summary.status, job.ledger.summary.tokens) == ("completed", 2000)
    texts = job.ledger.event_texts("warning")
    assert warning is None or [text.endswith(warning) for text in texts] == [True] * bool(warning)


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
together = threading.Barrier(8)
def initialise():
    together.wait()
    effllm.initialize_efficientllm_metrics(1000)
threads = [threading.Thread(target=initialise) for _ in range(8)]
for one in threads: one.start()
for one in threads: one.join()
"""
    job = launch.code(start + LOOP + END).done()

    assert len(job.runs()) == 1
    assert (job.ledger.summary.iterations, job.ledger.summary.tokens) == (20, 2000)


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
    assert len(launch.code(script).done().runs()) == 1


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


def test_long_command_line_leaves_all_other_facts(launch):
    more = "import sys; sys.argv += ['--data', 'x' * 5000] + ['shard.bin'] * 10_000\n"
    job = launch.code(
        f"{more}import time\n{LOOP}{END}".replace("metrics(1000)", "metrics(1000, facts={'model': 'small'})")
    )

    facts = job.done().ledger.facts
    assert facts["model"] == "small"
    assert facts["command"][-1].endswith(" more words")
    assert sum(map(len, facts["command"])) < 10_000


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
