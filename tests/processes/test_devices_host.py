"""effllm/devices/host.py with real child processes and with a powercap tree in a folder."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_reader import Clock
from jobs import until
from powercap_tree import Powercap, forbid_reading

from effllm.devices import Site
from effllm.devices.host import open_device
from effllm.devices.node import rapl
from effllm.devices.node.rapl import NO_RAPL, RAPL_UNREADABLE

MIB = 2**20
DEADLINE_S = 30.0

# The process answers every line with one line, so tests can wait for the end of a request.
ECHO = """
import ctypes, os, subprocess, sys, time
libc = ctypes.CDLL(None)
MIB = 2**20
held, pids = [], []
def grow(mib): held.append(bytearray(os.urandom(4096)) * (mib * 256))
def fork(body):
    pid = os.fork()
    if pid == 0:
        libc.prctl(1, 9)  # PR_SET_PDEATHSIG: a child of a child goes too
        body()
        os._exit(0)
    pids.append(pid)
    return pid
def fork_waiting(body):
    # Returns once the child has run body; the child then waits to be killed.
    there, here = os.pipe()
    def child():
        body()
        os.write(here, b"x")
        time.sleep(600)
    pid = fork(child)
    os.read(there, 1)
    return pid
def burn(seconds):
    while time.process_time() < seconds: pass
for line in sys.stdin:
    print(eval(line), flush=True)
for pid in pids:
    try:
        os.kill(pid, 9); os.waitpid(pid, 0)
    except OSError:
        pass
"""


class Trainer:
    """A real process that evaluates the test's expressions."""

    def __init__(self, process):
        self.pid = process.pid
        self.process = process

    def do(self, expression):
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def trainer():
    with subprocess.Popen(
        [sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        trainer = Trainer(process)
        trainer.do("'it has started'")
        try:
            yield trainer
        finally:
            process.stdin.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def no_rapl(tmp_path):
    return tmp_path / "no-powercap"


@contextmanager
def opened(site, clock, powercap):
    reader = open_device(site, clock=clock, powercap=powercap, pause=lambda _: None)
    try:
        yield reader
    finally:
        reader.close()


@pytest.fixture
def reader(trainer, clock, no_rapl):
    with opened(Site(trainer_pid=trainer.pid, host="node1"), clock, no_rapl) as reader:
        yield reader


def memory_mib(reader, clock):
    """Return the measured memory (MiB) after a new search for descendants."""
    clock.now_s += 10.0
    sample, failures = reader.read()
    assert failures == {}
    return sample.memory_bytes / MIB


def test_host_device_is_shared_and_measures_no_energy_without_rapl(reader):
    device = reader.device

    assert (device.key, device.kind, device.is_gpu, device.shared) == ("host:node1", "host", False, True)
    assert device.name
    assert device.memory_total_bytes > 100 * MIB
    assert (device.energy_method, device.power_scope, device.not_measured) == (None, None, (NO_RAPL,))


def test_memory_of_the_trainer_is_measured(trainer, reader, clock):
    before = memory_mib(reader, clock)
    trainer.do("grow(50)")

    assert memory_mib(reader, clock) - before == pytest.approx(50, abs=3)


def test_pages_shared_with_a_forked_child_are_counted_once(trainer, reader, clock):
    trainer.do("grow(100)")
    before = memory_mib(reader, clock)
    trainer.do("fork_waiting(lambda: None)")

    assert memory_mib(reader, clock) - before == pytest.approx(0, abs=5)


def test_memory_that_a_forked_child_allocates_later_is_counted(trainer, reader, clock):
    trainer.do("grow(100)")
    before = memory_mib(reader, clock)
    trainer.do("fork_waiting(lambda: (time.sleep(0.5), grow(50)))")  # returns after the child has allocated memory

    assert memory_mib(reader, clock) - before == pytest.approx(50, abs=5)


def test_excluded_processes_and_their_children_are_not_counted(trainer, clock, no_rapl):
    excluded = int(trainer.do("fork_waiting(lambda: fork_waiting(lambda: grow(50)))"))

    with opened(Site(trainer_pid=trainer.pid, excluded_pids=frozenset({excluded})), clock, no_rapl) as reader:
        without = memory_mib(reader, clock)
    with opened(Site(trainer_pid=trainer.pid), clock, no_rapl) as reader:
        with_them = memory_mib(reader, clock)

    assert with_them - without == pytest.approx(50, abs=5)


def test_memory_of_the_reader_process_is_not_counted(clock, no_rapl):
    code = f"""
from pathlib import Path
import os
from effllm.devices import Site
from effllm.devices.host import open_device
blob = bytearray(os.urandom(4096)) * ({100 * MIB} // 4096)
reader = open_device(Site(trainer_pid=os.getppid()), powercap=Path({str(no_rapl)!r}))
print(reader.read()[0].memory_bytes)
reader.close()
"""
    measured = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    with opened(Site(trainer_pid=os.getpid()), clock, no_rapl) as reader:
        alone = reader.read()[0].memory_bytes
    assert measured < alone + 50 * MIB


def test_first_read_returns_no_utilization_and_no_failure(reader):
    sample, failures = reader.read()

    assert (sample.utilization, failures) == (None, {})


def cpu_s_between(reader, act):
    """Return the CPU seconds that the reader measures between two reads around ``act``."""
    first, _ = reader.read()
    act()
    second, _ = reader.read()
    return second.utilization * (second.time_ns - first.time_ns) / 1e9 * os.cpu_count()


@pytest.mark.alone
@pytest.mark.parametrize(
    ("action", "busy_s"),
    [
        ("burn(time.process_time() + 0.3)", 0.3),
        ("time.sleep(0.2)", 0.0),
        ("os.waitpid(fork(lambda: burn(0.3)), 0)", 0.3),  # a short-lived child
    ],
)
def test_utilization_is_the_cpu_time_of_the_trainer_and_its_children(trainer, reader, action, busy_s):
    assert cpu_s_between(reader, lambda: trainer.do(action)) == pytest.approx(busy_s, abs=0.06)


def test_cpu_time_of_a_reaped_child_is_counted_once(trainer, reader, clock):
    child = trainer.do("fork_waiting(lambda: burn(0.3))")
    memory_mib(reader, clock)  # this read finds the child, which has used 0.3 s of CPU time

    assert cpu_s_between(reader, lambda: trainer.do(f"(os.kill({child}, 9), os.waitpid({child}, 0))")) < 0.1


def test_cpu_time_of_a_zombie_is_counted_once(trainer, reader, clock):
    child = trainer.do("fork_waiting(lambda: burn(0.3))")
    memory_mib(reader, clock)
    trainer.do(f"os.kill({child}, 9)")
    until(lambda: Path(f"/proc/{child}/stat").read_text().split()[2] == "Z")
    reader.read()

    assert cpu_s_between(reader, lambda: trainer.do(f"os.waitpid({child}, 0)")) < 0.1


@pytest.mark.alone
def test_utilization_is_not_negative_if_time_of_a_child_is_lost(trainer, reader, clock):
    trainer.do("__import__('signal').signal(17, 1)")  # SIGCHLD is ignored: the time of ended children is lost
    child = trainer.do("fork_waiting(lambda: burn(0.3))")
    memory_mib(reader, clock)

    def act():
        trainer.do(f"os.kill({child}, 9)")
        until(lambda: not Path(f"/proc/{child}").exists())
        trainer.do("burn(time.process_time() + 0.2)")

    assert cpu_s_between(reader, act) == pytest.approx(0.2, abs=0.06)


def test_reader_searches_descendants_every_ten_seconds(trainer, reader, clock):
    before = memory_mib(reader, clock)
    trainer.do("fork_waiting(lambda: grow(50))")

    clock.now_s += 9.9
    early, _ = reader.read()
    clock.now_s += 0.1
    late, _ = reader.read()

    assert early.memory_bytes / MIB - before < 10
    assert late.memory_bytes / MIB - before > 40


@pytest.mark.parametrize("is_zombie", [False, True])
def test_reading_an_ended_trainer_is_reported_as_a_failure(trainer, reader, is_zombie):
    reader.read()
    if is_zombie:
        os.kill(trainer.pid, signal.SIGKILL)
        until(lambda: Path(f"/proc/{trainer.pid}/stat").read_text().split()[2] == "Z")
    else:
        trainer.end()

    sample, failures = reader.read()

    assert (sample.memory_bytes, sample.utilization) == (None, None)
    assert failures == dict.fromkeys(["memory_bytes", "utilization"], "the trainer has ended")


def test_reads_with_an_invalid_trainer_pid_are_reported_as_failures(clock, no_rapl):
    with opened(Site(trainer_pid=0), clock, no_rapl) as reader:
        _, failures = reader.read()

    assert set(failures) == {"memory_bytes", "utilization"}


def num_open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_files_of_ended_processes_and_of_a_closed_reader_are_closed(trainer, clock, no_rapl):
    child = trainer.do("fork_waiting(lambda: None)")
    before = num_open_files()
    with opened(Site(trainer_pid=trainer.pid), clock, no_rapl) as reader:
        reader.read()
        with_child = num_open_files()
        trainer.do(f"(os.kill({child}, 9), os.waitpid({child}, 0))")
        reader.read()
        without_child = num_open_files()

    assert [number - before for number in (with_child, without_child, num_open_files())] == [4, 2, 0]


# --- RAPL; its own tests are in test_node_power_rapl.py ---


@pytest.fixture
def powercap(tmp_path):
    return Powercap(tmp_path / "powercap")


def test_local_rank_0_measures_energy_of_the_host_with_scope_cpu(trainer, powercap, clock):
    with opened(Site(trainer_pid=trainer.pid, local_rank=0), clock, powercap.root) as reader:
        before, _ = reader.read()
        clock.now_s += 1.0
        powercap.set_j("intel-rapl:0", 1300)
        sample, failures = reader.read()

    assert (reader.device.energy_method, reader.device.power_scope) == ("counter", "cpu")
    assert (sample.energy_j - before.energy_j, sample.power_w, failures) == (300.0, None, {})


def test_host_device_and_rapl_node_sensor_share_the_energy_key(trainer, powercap, clock):
    with opened(Site(trainer_pid=trainer.pid, host="node1"), clock, powercap.root) as reader:
        by_device = reader.device
    by_node = rapl.open_reader("node1", rapl.open_rapl(clock, powercap.root, pause=lambda _: None)).device

    assert (by_device.key, by_device.energy_key) == ("host:node1", by_node.key)
    assert (by_device.energy_note, by_device.sensor) == (by_node.energy_note, by_node.sensor)


def test_local_ranks_other_than_0_measure_no_energy(trainer, powercap, clock):
    with opened(Site(trainer_pid=trainer.pid, local_rank=1), clock, powercap.root) as reader:
        sample, failures = reader.read()

    assert (reader.device.energy_method, reader.device.energy_key, reader.device.not_measured) == (None, "", ())
    assert (sample.energy_j, failures) == (None, {})


def test_unreadable_rapl_is_reported_with_advice(trainer, powercap, clock, monkeypatch):
    forbid_reading(monkeypatch, "energy_uj")
    with opened(Site(trainer_pid=trainer.pid), clock, powercap.root) as reader:
        sample, failures = reader.read()

    assert (reader.device.energy_method, reader.device.not_measured) == (None, (RAPL_UNREADABLE,))
    assert (sample.energy_j, failures) == (None, {})


HIDDEN_CHILD = """
import os, subprocess, time
from effllm.devices.host import ProcessTree
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    os.setgroups([])
    os.setresgid(65534, 65534, 0)  # group 0 may read all
    os.setresuid(65534, 65534, 0)
    memory_bytes, _ = ProcessTree(os.getpid(), frozenset(), time.monotonic).read_usage()
finally:
    os.setresuid(0, 0, 0)
    child.kill()
print(memory_bytes > 1e6)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a mount namespace needs root and unshare")
def test_descendant_that_proc_hides_from_the_user_is_left_out():
    """Of ``/proc`` with the option hidepid, a user may not read the processes of another user, such as sudo."""
    script = 'mount -t proc -o hidepid=1 proc /proc || exit 77; exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, HIDDEN_CHILD],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip("no mount namespaces here")

    assert done.stdout == "True\n", done.stderr
