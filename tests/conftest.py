"""What holds for every test: a clean environment before it, and nothing of it left running after it."""

import os
import re
import signal
import uuid
from pathlib import Path

import cli_process
import jobs
import nvml_library
import pytest

pytest_plugins = ["hosts", "reliability", "systems"]

LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "GROUP_", "ROLE_")
PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEVICES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVML_TRACE")


def pytest_collection_modifyitems(items):
    """Keep the tests of a job that a whole module shares in one process, where tests run in several."""
    for item in items:
        shared = [name for name, found in item._fixtureinfo.name2fixturedefs.items() if found[-1].scope == "module"]
        if shared and not item.get_closest_marker("xdist_group"):
            chosen = getattr(getattr(item, "callspec", None), "params", {})
            names = [f"{name}={chosen.get(name)}" for name in sorted(shared)]
            item.add_marker(pytest.mark.xdist_group(" ".join([item.module.__name__, *names])))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    """Take off what pytest-xdist appends to a test's name, its group, so that ``--last-failed`` finds the test."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        report.nodeid = re.sub(r"(::\w+(?:\[.*\])?)@[^@]*$", r"\1", report.nodeid)


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory):
    """Take away what the caller's shell says about metrics, launchers and GPUs; mark what the tests start."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background; it would be what jobs inherit
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("EFFICIENTLLM_", *LAUNCHERS)) or name in (*PLACES, *DEVICES):
                patch.delenv(name)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))  # never the user's own secret
        patch.setenv(jobs.SESSION, uuid.uuid4().hex)
        jobs.skip_older()
        yield


@pytest.fixture(autouse=True)
def own_calibrations(clean_environment, tmp_path, monkeypatch):
    """Let each test learn its sensors anew: two traces may give one name to different GPUs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def own_secret(clean_environment, tmp_path, monkeypatch):
    """Let no test know another's secret."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind(clean_environment):
    """Fail a test after which a process that it started, or shared memory with a name, is still there."""
    before = set(jobs.processes_of_session()), _shared_memory()
    yield
    left = jobs.gone(lambda: set(jobs.processes_of_session()) - before[0], jobs.GONE_WITHIN_S)
    assert not left, f"still running: {[jobs.describe(pid) for pid in left]}"
    assert _shared_memory() <= before[1]


def _shared_memory():
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if "effllm" in path.name} if folder.is_dir() else set()


@pytest.fixture
def launch(tmp_path):
    """Start jobs of real processes in the test's own folder; those that outlive the test are ended."""
    with jobs.launching(tmp_path) as launch:
        yield launch


@pytest.fixture
def cli(tmp_path):
    """Run the command line in the test's own folder."""
    command_line = cli_process.CommandLine(tmp_path)
    yield command_line
    command_line.close()


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The folder of the NVML library whose devices follow a trace."""
    folder = nvml_library.build(tmp_path_factory.mktemp("nvml"))
    if folder is None:
        pytest.skip("no C compiler: the NVML library of the tests cannot be built")
    return folder


@pytest.fixture
def trace(library, tmp_path):
    """A trace of the test's own."""
    return nvml_library.Trace(library, tmp_path / "trace")
