"""Jobs of real processes: starts them, finds their processes, reads their output.

Every process of a test has two tokens in its environment, one of the test session and one of its job. With these
tokens, tests also find agents and aggregators, which run in separate process sessions.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
from run_lines import WindowRow, read_events, read_ranks, read_windows

import effllm
from effllm.config.settings import Config
from effllm.config.spawn import spawn
from effllm.records.job import Summary
from effllm.records.orders import Orders
from effllm.records.rank import Event
from effllm.store.reader import RankRow

if TYPE_CHECKING:
    from hosts import Host

SESSION, JOB = "TESTS_OF_SESSION", "TESTS_OF_JOB"
SCRIPTS = Path(__file__).parent / "scripts"
PACKAGE = Path(effllm.__file__).parent
PY_SPY = shutil.which("py-spy") or str(Path(sys.executable).parent / "py-spy")
needs_py_spy = pytest.mark.skipif(not os.access(PY_SPY, os.X_OK), reason="py-spy is not installed")
#: Timeout for the end of a job's processes: half a second on an idle machine, much longer on a busy one.
GONE_WITHIN_S = 40.0

skip_without_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_torch = [pytest.mark.torch, skip_without_torch]

#: The contract of the console block: its labels, their order and formats, and the coverage line at its end.
BLOCK = re.compile(
    r"^\[EfficientLLM Metrics\] (?P<style>Iteration|Step) (?P<iteration>\d+):\n"
    r"(?:  Loss: (?P<loss>-?\d+\.\d{6})\n)?"
    r"(?:  AMU \(GB\): (?P<amu_gb>\d+\.\d{2})\n)?"
    r"(?:  PCU \(Ratio\): (?P<pcu_ratio>\d\.\d{3})\n)?"
    r"(?:  AL \(Seconds\): (?P<al_seconds>\d+\.\d{4})\n)?"
    r"(?:  TT \(Tokens/Param/Sec\): (?P<tt_tokens_per_param_per_sec>\d\.\d{2}e[+-]\d{2})\n)?"
    r"(?:  ST \(Samples/Param/Sec\): (?P<st_samples_per_param_per_sec>\d\.\d{2}e[+-]\d{2})\n)?"
    r"(?:  AEC \(Watts\): (?P<aec_watts>\d+\.\d{2})\n)?"
    r"  Ranks: (?P<ranks>\d+/\d+)  GPUs: (?P<gpus>\d+/\d+)  lost (?P<lost>\d+)  late (?P<late>\d+)(?P<rest>.*)\n",
    re.MULTILINE,
)
FORMATS = {
    "amu_gb": "{:.2f}",
    "pcu_ratio": "{:.3f}",
    "al_seconds": "{:.4f}",
    "tt_tokens_per_param_per_sec": "{:.2e}",
    "st_samples_per_param_per_sec": "{:.2e}",
    "aec_watts": "{:.2f}",
}


def in_lines(value: float) -> float:
    """Return a value with 12 digits, as in windows-*.jsonl."""
    return float(f"{value:.12g}")


def until(condition: Callable[[], Any], within_s: float = 120.0) -> Any:
    """Call ``condition`` until it returns a true value, and return this value; fail after a timeout."""
    deadline_s = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not so within {within_s} s"
        time.sleep(0.01)
    return value


def wait_until_gone(left: Callable[[], set[int]], within_s: float) -> set[int]:
    """Wait until all processes have ended, for at most ``within_s``; return the remaining processes."""
    deadline_s = time.monotonic() + within_s
    while (pids := left()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return pids


def processes(token: str, skipped: Collection[int] = ()) -> Iterator[int]:
    """Yield the running processes whose environment contains ``token``, except this process and ``skipped``."""
    wanted = token.encode()
    for pid in psutil.pids():
        if pid != os.getpid() and pid not in skipped:
            with suppress(OSError):  # the process has ended or belongs to another user
                if wanted in Path(f"/proc/{pid}/environ").read_bytes():
                    yield pid


_older: set[int] = set()  # processes that were started before the tests


def skip_older() -> None:
    """Record the processes that run before the first test, so that their environments are not read for each test."""
    _older.update(psutil.pids())


def processes_of_session() -> Iterator[int]:
    """Yield the running processes of this test session without Python's resource trackers, which end with Python."""
    _older.intersection_update(psutil.pids())  # a new process may have the pid of an ended one
    for pid in processes(f"{SESSION}={os.environ[SESSION]}", _older):
        if "resource_tracker" not in describe(pid):
            yield pid


def describe(pid: int) -> str:
    """Return the command line of a process, or an empty text if the process has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def rank_environ(rank: int, world_size: int, local_rank: int | None = None) -> dict[str, str]:
    """Return the variables that a launcher sets for a process of this rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank if local_rank is None else local_rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def openmpi_environ(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that mpirun sets for a rank on a job's only host; such ranks find each other by a file."""
    place = {"RANK": rank, "SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_SIZE": world_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}


def first_on_path(folder: Path) -> dict[str, str]:
    """Return the environment variable that puts a folder first on Python's path."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))}


def long_timeouts() -> dict[str, str]:
    """Return the environment variable that makes some timeouts of trainers and agents ten times as long."""
    return first_on_path(SCRIPTS / "long_timeouts")


class Ledger:
    """Reads the run folder of a job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def summary(self) -> Summary:
        return msgspec.json.decode((self.folder / "summary.json").read_bytes(), type=Summary)

    @property
    def windows(self) -> list[WindowRow]:
        """Return all reports in windows-*.jsonl; fail if a line is damaged."""
        return _whole(read_windows(self.folder))

    @property
    def ranks(self) -> list[RankRow]:
        """Return all reports in ranks-*.jsonl; fail if a line is damaged."""
        return _whole(read_ranks(self.folder))

    @property
    def events(self) -> list[Event]:
        """Return all events of events.jsonl; fail if a line is damaged."""
        return _whole(read_events(self.folder))

    @property
    def num_windows(self) -> int:
        """Number of complete lines in the first window file so far."""
        path = self.folder / "windows-0001.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def event_texts(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]

    @property
    def facts(self) -> dict[str, Any]:
        return msgspec.json.decode((self.folder / "run.json").read_bytes(), type=dict[str, Any])


def _whole(rows: Any) -> list[Any]:
    deadline_s = time.monotonic() + 10.0
    read = list(rows)
    while rows.num_skipped and time.monotonic() < deadline_s:  # a line may be half written
        time.sleep(0.05)
        read = list(rows)
    assert rows.num_skipped == 0
    return read


class Job:
    """The processes with one token; the test starts the first one and waits for it."""

    def __init__(self, folder: Path, runs: Path, prefix: Sequence[str] = ()) -> None:
        self.folder = folder  # folder of stdout.txt, stderr.txt and the files of the script
        self.token = f"{JOB}={uuid.uuid4().hex}"
        self._runs = runs
        self._prefix = prefix
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], environ: dict[str, str], stdout: int | None = None) -> Job:
        """Start the first process; ``stdout`` replaces the file stdout.txt."""
        name, _, value = self.token.partition("=")
        with (self.folder / "stdout.txt").open("wb") as out, (self.folder / "stderr.txt").open("wb") as err:
            self.process = subprocess.Popen(
                [*self._prefix, *command],
                env={**environ, name: value},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
            )
        return self

    def wait(self, within_s: float = 200.0) -> Job:
        assert self.process
        self.process.wait(within_s)
        return self

    def done(self, within_s: float = 200.0) -> Job:
        """Wait for all processes of the job; fail if the first process fails or if a process remains."""
        assert self.wait(within_s).code == 0, self.stderr
        assert not self.left()
        return self

    def finish(self, within_s: float = 150.0) -> int:
        """Create the file "enough", which ends the loop of the script; return the number of iterations."""
        (self.folder / "enough").touch()
        return len(self.done(within_s).output()["steps"])

    def left(self, within_s: float = GONE_WITHIN_S) -> set[int]:
        """Wait for the end of all processes, for at most ``within_s``; return the remaining processes."""
        return wait_until_gone(lambda: set(processes(self.token)), within_s)

    @property
    def code(self) -> int | None:
        assert self.process
        return self.process.returncode

    def find(self, module: str) -> list[int]:
        """Return the processes of the job that run this module of effllm."""
        return [pid for pid in processes(self.token) if f"import_module({module!r})" in describe(pid)]

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout.txt").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr.txt").read_text()

    @property
    def our_errors(self) -> list[str]:
        """Return the lines of effllm on stderr."""
        # Warnings of other packages may contain the folder of a clone, and its name may be effllm.
        ours = re.compile(rf"EfficientLLM|(?<![/\w])effllm|{re.escape(str(PACKAGE))}")
        return [line for line in self.stderr.splitlines() if ours.search(line)]

    @property
    def blocks(self) -> list[dict[str, str | None]]:
        """Return the console blocks; fail if a block is not complete."""
        found = [match.groupdict() for match in BLOCK.finditer(self.stdout)]
        assert len(found) == self.stdout.count("[EfficientLLM Metrics]")
        return found

    def output(self, name: str = "truth.json") -> Any:
        """Return the content of a JSON file that the script wrote."""
        return json.loads((self.folder / name).read_text())  # nan is allowed

    def max_step_s(self) -> float:
        """Return the duration of the longest step with its log_metrics call, without waits for a CPU."""
        truth = self.output()
        parts = zip(truth["steps"], truth["logging_s"], itertools.pairwise(truth["starved_s"]), strict=True)
        return max(end - start + logging - (after - before) for (start, end), logging, (before, after) in parts)

    def runs(self) -> list[Path]:
        return sorted(path for path in self._runs.iterdir() if path.is_dir()) if self._runs.is_dir() else []

    @property
    def num_windows(self) -> int:
        """Number of windows in the only run folder so far."""
        return self.ledger.num_windows if self.runs() else 0

    @property
    def ledger(self) -> Ledger:
        (folder,) = self.runs()
        return Ledger(folder)

    def end(self) -> None:
        """Kill the running processes of the job, by their pids."""
        for pid in processes(self.token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process:
            self.process.wait(10)
        wait_until_gone(lambda: set(processes(self.token)), GONE_WITHIN_S)


class Launcher:
    """Starts jobs; keywords set variables: ``log_interval=5`` sets EFFICIENTLLM_LOG_INTERVAL."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: list[Job] = []
        self._prefix: list[str] = []

    def on(self, host: Host) -> Launcher:
        """Return a launcher with the same folder whose commands run on ``host``, from the fixture ``hosts``."""
        other = copy(self)
        other._prefix = host.prefix
        return other

    def environ(self, settings: dict[str, Any], **variables: str) -> dict[str, str]:
        """Return an environment with these settings; the defaults make a short job with simulated devices."""
        defaults = {"device": "simulated", "collection_interval": 0.05, "run_dir": self._folder / "runs"}
        defaults["stacks"] = "off"  # many jobs run at once here, and each recording takes a part of a core
        defaults["log_interval"] = 10  # a window has ten iterations, also if they are short
        if "127.0.0.1" in str(settings.get("endpoint", "")) and "secret_file" not in settings:
            defaults["security"] = "none"  # as in `Aggregator`
        chosen = {f"EFFICIENTLLM_{name.upper()}": str(value) for name, value in {**defaults, **settings}.items()}
        return {**os.environ, "OMP_NUM_THREADS": "1", **chosen, **variables}

    def _job(self) -> Job:
        folder = self._folder / f"job{len(self._jobs)}"
        folder.mkdir()
        job = Job(folder, self._folder / "runs", self._prefix)
        self._jobs.append(job)
        return job

    def python(self, *arguments: Any, environ: dict[str, str] | None = None, **settings: Any) -> Job:
        """Start a script of ``tests/scripts/`` or another path; the other arguments go to the script."""
        script, *rest = arguments
        command = [sys.executable, str(SCRIPTS / script), *map(str, rest)]
        return self._job().start(command, self.environ(settings, **(environ or {})))

    def code(self, code: str, environ: dict[str, str] | None = None, **settings: Any) -> Job:
        """Start a script from its source text."""
        job = self._job()
        script = job.folder / "script.py"
        script.write_text(code)
        return job.start([sys.executable, str(script)], self.environ(settings, **(environ or {})))

    def torchrun(
        self,
        options: Sequence[str],
        script: str,
        *arguments: Any,
        environ: dict[str, str] | None = None,
        **settings: Any,
    ) -> Job:
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPTS / script)]
        return self._job().start([*command, *map(str, arguments)], self.environ(settings, **(environ or {})))

    def aggregator(self, **settings: Any) -> Aggregator:
        """Start a separate aggregator; ranks need its endpoint."""
        return Aggregator(self._job(), self._folder / "runs" / "served", self.environ(settings))

    def ranks(self, aggregator: Aggregator, world_size: int, *arguments: Any, **settings: Any) -> list[Job]:
        """Start all ranks of a job with the same script and arguments; they connect to this aggregator."""
        settings["endpoint"] = aggregator.endpoint
        return [self.python(*arguments, environ=rank_environ(at, world_size), **settings) for at in range(world_size)]

    def close(self) -> None:
        for job in self._jobs:
            job.end()


class Aggregator:
    """An aggregator that the test started instead of an agent."""

    def __init__(self, job: Job, run_folder: Path, environ: dict[str, str]) -> None:
        from effllm.config.settings import read_config

        self.job = job
        self.ledger = Ledger(run_folder)
        config: Config = read_config(environ)
        with socket.socket() as listener, (job.folder / "stdout.txt").open("wb") as out:
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            self.port: int = listener.getsockname()[1]
            self.endpoint = f"tcp://127.0.0.1:{self.port}"
            orders = Orders(
                config=config,
                job="",
                endpoint=self.endpoint,
                folder=str(run_folder),
                listen_descriptor=listener.fileno(),
                stdout_descriptor=out.fileno(),
                secured=config.security == "curve",
            )
            with memory_file(msgspec.json.encode(orders)) as file, pytest.MonkeyPatch.context() as patch:
                patch.setenv(*job.token.split("="))
                job.process = spawn("effllm.server.process", [str(file)], [file, listener.fileno(), out.fileno()])
        (job.folder / "stderr.txt").touch()


@contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """Yield the descriptor of a file in memory."""
    descriptor = os.memfd_create("test")
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def launching(folder: Path) -> Iterator[Launcher]:
    """Yield a launcher for jobs in ``folder``."""
    launcher = Launcher(folder)
    try:
        yield launcher
    finally:
        launcher.close()


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens."""
    process = psutil.Process(pid)
    connections = process.net_connections if hasattr(process, "net_connections") else process.connections
    return {one.laddr.port for one in connections("tcp") if one.status == psutil.CONN_LISTEN}
