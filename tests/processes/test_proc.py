"""effllm/agent/proc.py: the wait for a CPU core, and the memory by which a process can still grow."""

import os
import subprocess
import sys

import pytest
from jobs import until

from effllm.agent.proc import CoreWait, available_bytes

BUSY = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"


@pytest.fixture
def two_on_one_core():
    """Yield two busy processes that have one core."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    yield busy
    for one in busy:
        one.kill()
        one.wait()


def test_wait_of_a_process_for_a_core_is_measured(two_on_one_core):
    one, _ = two_on_one_core
    waits = until(lambda: (found := CoreWait(one.pid)).seconds() is not None and found)

    assert until(lambda: waits.seconds() > 0.2)
    one.kill()
    one.wait()
    assert waits.seconds() > 0.2, "the last reading stays"


def test_wait_is_unknown_without_a_process():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    assert CoreWait(ended.pid).seconds() is None
    assert CoreWait(os.getpid()).seconds() >= 0.0


MIB = 2**20


@pytest.fixture
def machine(tmp_path):
    """Files of the kernel: 100 MiB are available on the machine; process 7 is in the cgroup /job/task."""
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 999999 kB\nMemAvailable:   {100 * 1024} kB\n")
    (tmp_path / "proc" / "7" / "cgroup").write_text("0::/job/task\n")
    (tmp_path / "cgroup" / "job" / "task").mkdir(parents=True)
    return tmp_path


def limit(group, most, current, files):
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {files}\nactive_file {files}\nfile 5\n")


def available(folder):
    return available_bytes(7, folder / "proc", folder / "cgroup")


def test_machine_without_a_limit_has_its_available_memory(machine):
    limit(machine / "cgroup" / "job" / "task", "max", 5 * MIB, 0)

    assert available(machine) == 100 * MIB


def test_limit_of_a_parent_group_counts_and_file_pages_are_available(machine):
    """60 - 50 + 2 x 5 = 20 MiB."""
    limit(machine / "cgroup" / "job", 60 * MIB, 50 * MIB, 5 * MIB)

    assert available(machine) == 20 * MIB


def test_memory_is_unknown_without_the_files_of_the_kernel(tmp_path):
    assert available(tmp_path) is None
