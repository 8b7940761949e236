"""Fixtures for all tests: a clean environment before each test; a test fails if its processes remain."""

import os
import re
import signal
import uuid
from pathlib import Path

import cases
import cli_process
import jobs
import nvml_library
import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["hosts", "systems"]

LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "GROUP_", "ROLE_")
PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEVICES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVML_TRACE")

# Other processes on the machine must not fail a test: no example has a deadline.
for name, number in cases.NUM_EXAMPLES.items():
    settings.register_profile(name, max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("small")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """With several test processes, run tests with a common module fixture in the same process.

    Mark the tests of modules with `cases.repeats`, as hypothesis marks its tests: make test-all runs both again, with
    more examples.
    """
    for item in items:
        if getattr(item.module, "repeats", None) is cases.repeats:
            item.add_marker(pytest.mark.repeats)
        shared = [name for name, found in item._fixtureinfo.name2fixturedefs.items() if found[-1].scope == "module"]
        if shared and not item.get_closest_marker("xdist_group"):
            chosen = getattr(getattr(item, "callspec", None), "params", {})
            names = [f"{name}={chosen.get(name)}" for name in sorted(shared)]
            item.add_marker(pytest.mark.xdist_group(" ".join([item.module.__name__, *names])))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    """Remove the group name that pytest-xdist appends to a test's name; ``--last-failed`` needs the name without it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        report.nodeid = re.sub(r"(::\w+(?:\[.*\])?)@[^@]*$", r"\1", report.nodeid)


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory):
    """Remove the caller's environment variables of effllm, launchers and GPUs; mark the processes that tests start."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # background jobs of a shell ignore SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("EFFICIENTLLM_", *LAUNCHERS)) or name in (*PLACES, *DEVICES):
                patch.delenv(name)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))  # tests never use the user's secret
        patch.setenv(jobs.SESSION, uuid.uuid4().hex)
        jobs.skip_older()
        yield


@pytest.fixture(autouse=True)
def own_user_folders(clean_environment, tmp_path, monkeypatch):
    """Give each test folders for its secret and calibrations: two traces may use one name for different GPUs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def metric_table():
    """Return the table of metrics; metrics that a test adds are removed after the test."""
    from effllm.metrics import METRICS

    before = dict(METRICS)
    yield METRICS
    METRICS.clear()
    METRICS.update(before)


@pytest.fixture(autouse=True)
def no_process_is_left(clean_environment, no_shared_memory_is_left):
    """Fail a test if its processes remain; `no_shared_memory_is_left` runs after their end."""
    before = set(jobs.processes_of_session())
    yield
    left = jobs.wait_until_gone(lambda: set(jobs.processes_of_session()) - before, jobs.GONE_WITHIN_S)
    assert not left, f"still running: {[jobs.describe(pid) for pid in left]}"


@pytest.fixture(autouse=True)
def no_shared_memory_is_left():
    """Fail a test if its named shared memory remains."""
    before = _shared_memory()
    yield
    assert _shared_memory() <= before


def _shared_memory():
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if "effllm" in path.name} if folder.is_dir() else set()


@pytest.fixture
def launch(tmp_path):
    """Return a launcher of jobs in the test's folder; processes that still run after the test are killed."""
    with jobs.launching(tmp_path) as launch:
        yield launch


@pytest.fixture
def cli(tmp_path):
    """Return a `CommandLine` that runs effllm in the test's folder."""
    command_line = cli_process.CommandLine(tmp_path)
    yield command_line
    command_line.close()


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Return the folder of the NVML library of the tests; a trace file defines its devices."""
    folder = nvml_library.build(tmp_path_factory.mktemp("nvml"))
    if folder is None:
        pytest.skip("no C compiler: the NVML library of the tests cannot be built")
    return folder


@pytest.fixture
def trace(library, tmp_path):
    """Return a trace for this test."""
    return nvml_library.Trace(library, tmp_path / "trace")
