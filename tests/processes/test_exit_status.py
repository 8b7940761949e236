"""The status of a run is the exit status of its trainer; its agent is not the parent that waits for it."""

import os

import pytest

pytestmark = pytest.mark.fault("exits")

#: Trains for some iterations in ``train``; the rest of each script ends in its own way.
TRAIN = """
import atexit, multiprocessing, os, signal, sys, time
import effllm

def train(iterations=40, start=True):
    if start:
        effllm.initialize_efficientllm_metrics(1000)
    collector = effllm.get_metrics_collector()
    for _ in range(iterations):
        collector.record_iteration_start()
        time.sleep(0.005)
        collector.record_iteration_end(100, 2)

def child(end=None):
    train()
    if end == "raise":
        raise ValueError("in the child")
    if end == "more":
        atexit.register(train, 10, start=False)  # runs before the end of the metrics

def start(method, end=None):
    process = multiprocessing.get_context(method).Process(target=child, args=(end,))
    process.start()
    process.join()
    sys.exit(process.exitcode)

"""

#: Name -> (last line of the script, exit status, status of the run); test_end_to_end_promises.py has other ends.
ENDS = {
    "os._exit after the last iteration": ("train(); os._exit(0)", 0, "completed"),
    "a forked child of multiprocessing": ("start('fork')", 0, "completed"),
    "an exception in a forked child of multiprocessing": ("start('fork', 'raise')", 1, "failed"),
    "sys.exit within monitor": ("with effllm.monitor(1000):\n train(start=False)\n sys.exit()", 0, "completed"),
    "an error code within monitor": ("with effllm.monitor(1000):\n train(start=False)\n sys.exit(3)", 3, "failed"),
    "a function of atexit that initialises": ("atexit.register(train)", 0, "completed"),
}

#: Refuses the calls of ioctl with PIDFD_GET_INFO, like a kernel before 6.15, in this process and its children.
FILTER = """
import ctypes, struct
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
IOCTL = {"x86_64": 16, "aarch64": 29}[__import__("os").uname().machine]
code = b"".join(struct.pack("<HBBI", *one) for one in [
    (LOAD, 0, 0, 0), (IF_EQUAL, 0, 3, IOCTL), (LOAD, 0, 0, 24), (IF_EQUAL, 0, 1, 0xC040FF0B),
    (RETURN, 0, 0, 0x00050019), (RETURN, 0, 0, 0x7FFF0000),
])
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Program(6, code))) == 0
"""


@pytest.mark.parametrize("end", ENDS)
def test_status_is_the_exit_status_of_the_process(launch, end):
    line, code, status = ENDS[end]
    job = launch.code(TRAIN + line).wait()

    assert job.code == code
    assert not job.left()
    assert (job.ledger.summary.status, job.ledger.summary.iterations) == (status, 40)


@pytest.mark.parametrize("end", ["os._exit after the last iteration", "a forked child of multiprocessing"])
def test_no_run_is_killed_if_the_exit_status_is_not_visible(launch, end):
    line, code, status = ENDS[end]
    job = launch.code(FILTER + TRAIN + line).wait()

    assert job.code == code
    assert not job.left()
    assert job.ledger.summary.status in ({status} if "multiprocessing" in end else {status, "ended"})
    assert job.ledger.summary.iterations == 40


def test_functions_of_atexit_run_before_the_end_in_a_spawned_child(launch):
    job = launch.code(f"{TRAIN}if __name__ == '__main__': start('spawn', 'more')\n").done()

    assert (job.ledger.summary.status, job.ledger.summary.iterations) == ("completed", 50)


def test_a_killed_agent_is_reported_once_in_a_forked_child(launch):
    """The metrics are finalised before the finalizers of multiprocessing run."""
    kill = "psutil.Process().children()[0].kill(); effllm.finalize_efficientllm_metrics()"
    script = TRAIN.replace("    train()\n", f"    train(); import psutil; {kill}\n", 1) + "start('fork')"
    job = launch.code(script).wait()

    assert job.code == 0
    assert job.stderr.count("was killed by signal 9") == 1


def test_a_program_that_replaces_itself_is_two_attempts(launch):
    """The first attempt ends at the exec, not at the end of the process."""
    again = "os.execv(sys.executable, [sys.executable, sys.argv[0], 'again'])"
    script = f"{TRAIN}\nif len(sys.argv) == 1:\n    train(); {again}\ntrain(30)\n"
    job = launch.code(script, run_name="one").done()

    assert not job.left()
    summary = job.ledger.summary
    assert (summary.status, summary.attempts, summary.iterations, summary.tokens) == ("completed", 2, 70, 7000)
    assert [one.status for one in summary.goodput.attempts] == ["ended", "completed"]


@pytest.mark.long
@pytest.mark.fault("late-aggregator")
def test_reports_of_a_short_job_wait_for_an_aggregator_that_starts_late(launch, tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(
        "import sys, time\nif any('effllm.server.process' in one for one in sys.orig_argv):\n    time.sleep(15)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "slow"), os.environ.get("PYTHONPATH")]))
    job = launch.code(TRAIN + "train(400)", environ={"PYTHONPATH": path}).wait()
    at_exit = job.find("effllm.agent.agent")

    assert (job.code, len(at_exit)) == (0, 1), "the launcher does not wait for the agent"
    assert "no aggregator has answered yet: its reports are kept for up to 30 s" in job.stderr
    assert not job.left(within_s=60.0)
    summary = job.ledger.summary
    assert (summary.status, summary.iterations, summary.tokens) == ("completed", 400, 40_000)
