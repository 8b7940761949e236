"""Scarce resources of a container: shared memory, room for temporary files, descriptors, cores."""

import contextlib
import os
import shutil
import statistics
import sys
from pathlib import Path

import jobs
import psutil
import pytest
from after_fault import assert_whole

pytestmark = pytest.mark.faults

LOOP = str(jobs.SCRIPTS / "loop.py")

#: A script that runs a command in a mount namespace in which /dev/shm and the temporary folder have 64 MB each and are
#: full.
FULL = """
mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o size=64m tmpfs "$TMPDIR" || exit 77
for folder in /dev/shm "$TMPDIR"; do dd if=/dev/zero of="$folder/taken" bs=1M count=65 2>/dev/null; done
echo > "$TMPDIR/more" 2>/dev/null && test -s "$TMPDIR/more" && exit 78
exec "$@"
"""


@pytest.fixture
def in_full_container(launch, tmp_path):
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("a mount namespace needs root, and unshare")

    def start(*arguments, **settings):
        (tmp_path / "temporary").mkdir()
        environ = {**launch.environ(settings), "TMPDIR": str(tmp_path / "temporary")}
        command = ["unshare", "--mount", "sh", "-c", FULL, "sh", sys.executable, LOOP, *map(str, arguments)]
        return launch._job().start(command, environ)

    return start


@pytest.mark.fault("tmpfs-full")
def test_job_with_full_dev_shm_and_tmp_is_measured(in_full_container):
    job = in_full_container("--iterations", 200).wait()
    if job.code == 77:
        pytest.skip("a tmpfs cannot be mounted here")
    job.done()

    assert_whole(job.ledger, {0: 200})
    assert job.our_errors == []


#: A loop that allocates 150 MB after 100 iterations.
GROWING = """
import time, effllm
effllm.initialize_efficientllm_metrics(1000)
for iteration in range(160):
    if iteration == 100:
        more = bytearray(150 * 2**20)
    effllm.get_metrics_collector().record_iteration_start()
    time.sleep(0.01)
    effllm.get_metrics_collector().record_iteration_end(100, 1)
effllm.finalize_efficientllm_metrics()
"""
LIMIT_BYTES = 200 * 2**20  # enough for the loop, but not for the loop with the agent and the aggregator


@contextlib.contextmanager
def cgroup(controller, limits):
    """Make a cgroup with the limit in one of these files; yield a command that starts another command in it."""
    name, root = f"effllm-{os.getpid()}", Path("/sys/fs/cgroup")
    group = root / controller / name if (root / controller).is_dir() else root / name
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a cgroup cannot be made here: {error}")
    try:
        files = [group / file for file in limits if (group / file).exists()]
        if not files:
            pytest.skip(f"the controller {controller} is not enabled for new cgroups")
        files[0].write_text(str(limits[files[0].name]))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        jobs.until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.mark.fault("memory-limit")
def test_trainer_survives_the_memory_limit_of_its_container(launch):
    job = launch._job()
    (job.folder / "growing.py").write_text(GROWING)
    with cgroup("memory", {"memory.max": LIMIT_BYTES, "memory.limit_in_bytes": LIMIT_BYTES}) as enter:
        job.start([*enter, sys.executable, "growing.py"], launch.environ({})).wait()

    assert job.code == 0, job.stderr


@pytest.mark.fault("no-threads")
@pytest.mark.parametrize("limit", ["pids.max 4", "pids.max 6", "pids.max 10", "ulimit -v 60000", "ulimit -v 150000"])
def test_job_without_threads_or_memory_trains_without_metrics(launch, limit):
    name, number = limit.split()[0], limit.split()[-1]
    shell = contextlib.nullcontext(["sh", "-c", f'{limit} && exec "$@"', "sh"])
    with cgroup("pids", {name: number}) if name == "pids.max" else shell as enter:
        job = launch._job().start([*enter, sys.executable, LOOP, "--iterations", "50"], launch.environ({})).wait()
        assert not job.left()

    assert (job.code, len(job.output()["steps"])) == (0, 50)
    assert "Traceback" not in job.stderr
    assert job.stderr.count("no metrics, training goes on") == 1
    assert job.stderr.count("too little memory or too few threads") + job.stderr.count("signal 6") >= 1


def test_agent_and_aggregator_end_before_other_processes_when_memory_runs_out(launch):
    job = launch.python("loop.py", "--until", "enough")
    started = jobs.until(lambda: job.find("effllm.server.process") and list(jobs.processes(job.token)))

    values = {pid: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in started}
    job.finish()

    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert sorted(values.values()) == sorted([own, 1000, 1000])


#: A script in which no file can be as large as the ring while metrics try to start.
WITHOUT = """
import resource
import effllm.efficientllm_metrics as effllm
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
effllm.initialize_efficientllm_metrics(1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
for _ in range(50):
    effllm.get_metrics_collector().record_iteration_start()
    effllm.get_metrics_collector().record_iteration_end(100, 1)
print("trained")
"""


@pytest.mark.fault("tmpfs-full")
def test_job_without_space_for_shared_memory_trains_without_metrics(launch):
    job = launch.code(WITHOUT).done()

    line, end = job.our_errors
    assert "no metrics, training goes on" in line
    assert "this job ran without metrics" in end
    assert (job.stdout, job.runs()) == ("trained\n", [])


#: A script that trains with steps that compute; other processes on the same core slow these steps down.
BUSY = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
import effllm.efficientllm_metrics as effllm
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
while not os.path.exists("enough"):
    collector.record_iteration_start()
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    collector.record_iteration_end(100, 2)
effllm.finalize_efficientllm_metrics()
"""


def cpu_s(pid):
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@pytest.mark.fault("one-core")
def test_agents_use_the_core_of_their_trainer_at_low_priority(launch):
    core = min(os.sched_getaffinity(0))
    script = launch._folder / "busy.py"
    script.write_text(BUSY)
    job = launch.python(script, core, collection_interval=0.1)
    (agent,) = jobs.until(lambda: job.find("effllm.agent.agent"))
    (server,) = jobs.until(lambda: job.find("effllm.server.process"))
    jobs.until(lambda: job.num_windows >= 3)
    trainer = job.process.pid
    masks = {os.sched_getaffinity(pid).__repr__() for pid in (trainer, agent, server)}
    niceness = {name: os.getpriority(os.PRIO_PROCESS, pid) for name, pid in (("trainer", trainer), ("agent", agent))}
    before = {pid: cpu_s(pid) for pid in (trainer, agent, server)}
    jobs.until(lambda: cpu_s(trainer) > before[trainer] + 3.0)
    used_s = {pid: cpu_s(pid) - before[pid] for pid in before}
    (job.folder / "enough").touch()
    job.done()

    assert masks == {repr({core})}
    assert niceness["agent"] >= min(niceness["trainer"] + 5, 19)
    summary = assert_whole(job.ledger, {0: job.ledger.summary.iterations})
    assert summary.energy.total_joules is not None
    assert statistics.median(row.coverage for row in job.ledger.ranks if not row.final) > 0.5
    assert (used_s[agent] + used_s[server]) / used_s[trainer] < 1.0
