"""Run configurations several times, in a random order.

Each repeat is a block with every configuration in random order. Each run has its own run folder with the tags
campaign, config and repeat. Runs that are complete are not repeated after Ctrl-C or a crash: start the command
again. The reason why a run has failed is in a file NAME.failed, and the campaign continues. The output of each run
is in the folder logs.

\b
Example of a plan:
  name: lr-study
  command: torchrun --nproc_per_node 8 train.py
  repeats: 3            # 3 by default
  warmup_runs: 1        # before the first repeat; not compared
  cooldown_s: 60        # pause between runs
  timeout_s: 7200       # a longer run has failed
  env: {OMP_NUM_THREADS: "1"}
  configurations:
    base: {args: --lr 1e-4}
    new: {args: --lr 3e-4, env: {NCCL_ALGO: Ring}}

Further keys: seed (of the order), tags, run_dir; and command in a configuration.

\b
Examples:
  effllm campaign plan.yaml --dry-run
  effllm campaign plan.yaml
  effllm compare efficientllm_runs/lr-study --by config

Exit status: 0 all runs completed, 1 a run failed, 2 wrong plan or use, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from msgspec import Meta, Struct

from effllm.analysis.sides import CAMPAIGN, CONFIGURATION, REPEAT, WARMUP
from effllm.analysis.yaml_document import load_yaml
from effllm.commands.output import complain
from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import process_environ
from effllm.records.plain_text import one_line
from effllm.store import own_files
from effllm.store.run_lock import status_of
from effllm.views.text.numbers import duration

END_WITHIN_S = 30.0  # time for a run to end after SIGINT and after SIGTERM, before the next signal
SUMMARY_WITHIN_S = 60.0  # time for the aggregator to complete the summary after the end of the training
MAX_PLAN_BYTES = 2**20
#: Names are tags and names of folders; a folder NAME-again-1 is of a run that was started again.
Name = Annotated[str, Meta(pattern=r"^(?!.*-again)[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=40)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
#: No process can get a NUL, half of a surrogate pair, or a variable with = in its name.
Word = Annotated[str, Meta(pattern=r"^[^\0\ud800-\udfff]*\Z")]
Words = Word | list[Word]
Environ = dict[Annotated[str, Meta(pattern=r"^[^=\0\ud800-\udfff]+\Z")], Word]


def main(
    path: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="The plan, a YAML file.")],
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Start failed runs again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the order of the runs, and run nothing.")] = False,
) -> int:
    """Run the campaign of a plan; return the exit status."""
    try:
        plan = read_plan(path)
        for run in order_of(plan):
            read_config({"EFFICIENTLLM_TAGS": ",".join(tags_of(plan, run))})  # raises `ConfigError` for a wrong tag
        folder = Path(plan.run_dir or read_config(process_environ()).run_dir).absolute() / plan.name
        if dry_run:
            for run in order_of(plan):
                print(one_line(f"{run.key}: {' '.join(command_of(plan, run.configuration))}"))
            return 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with _locked(folder) as lock:
            return Campaign(plan, folder, lock, retry_failed=retry_failed).run()
    except ImportError:
        return complain("campaign", "this command needs PyYAML: pip install 'effllm[analysis]'", 2)
    except (WrongPlan, ConfigError) as error:
        return complain("campaign", str(error), 2)
    except OSError as error:
        return complain("campaign", f"{error.filename or path}: {error.strerror}", 2)
    except KeyboardInterrupt:
        return complain("campaign", f"interrupted; continue with: effllm campaign {path}", 130)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Lock the folder of a campaign, and yield the descriptor of the lock; `WrongPlan` if it is locked already."""
    own_files.make_folder(folder)
    lock = own_files.open_file(folder / "campaign.lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WrongPlan(f"another process runs the campaign in {folder}, or one of its runs continues") from error
        yield lock
    finally:
        os.close(lock)


class Campaign:
    """Runs what a plan has still to do; ``folder`` has its run folders, and ``lock`` is a descriptor of `_locked`."""

    def __init__(self, plan: Plan, folder: Path, lock: int, *, retry_failed: bool) -> None:
        self._plan, self._folder, self._lock, self._retry_failed = plan, folder, lock, retry_failed
        self._runs = order_of(plan)  # all runs, in their order

    def run(self) -> int:
        """Run what is missing; return 1 if a run of the campaign has failed, else 0."""
        waiting = [run for run in self._runs if not self._has_ended(run)]
        num_runs, num_ended = len(self._runs), len(self._runs) - len(waiting)
        if num_ended:
            print(f"{num_ended} of {num_runs} runs have ended before; they are not repeated")
        for number, run in enumerate(waiting, num_ended + 1):
            if run is not waiting[0] and self._plan.cooldown_s:
                time.sleep(self._plan.cooldown_s)
            print(f"[{number}/{num_runs}] {run.key}", flush=True)
            start_s = time.monotonic()
            problem = self._run_and_record(run)
            outcome = f"failed: {one_line(problem)}" if problem else "completed"
            print(f"  after {duration(time.monotonic() - start_s)}: {outcome}")
        if failed := [run.key for run in self._runs if self._failure_path(run).exists()]:
            print(f"{len(failed)} of {num_runs} runs failed: {', '.join(failed)}; --retry-failed repeats them")
        print(f"Compare: effllm compare {one_line(str(self._folder))} --by {CONFIGURATION}")
        return int(bool(failed))

    def _has_ended(self, run: PlannedRun) -> bool:
        """Whether a run is complete, or has failed and is not to be started again."""
        if self._failure_path(run).exists():
            return not self._retry_failed
        return any(status_of(folder) == "completed" for folder in self._folders_and_next(run) if folder.exists())

    def _failure_path(self, run: PlannedRun) -> Path:
        return self._folder / f"{run.key}.failed"

    def _folders_and_next(self, run: PlannedRun) -> Iterator[Path]:
        """Yield the run folders of a run, and then the folder of its next start."""
        for number in itertools.count():
            folder = self._folder / (f"{run.key}-again-{number}" if number else run.key)
            yield folder
            if not folder.exists():
                return

    def _run_and_record(self, run: PlannedRun) -> str:
        """Run one run; return why it has failed, which is also recorded, or ""; after Ctrl-C the run is still to do."""
        self._failure_path(run).unlink(missing_ok=True)
        *_, folder = self._folders_and_next(run)  # the last: a folder that does not exist yet
        problem = self._execute_command(run, folder.name) or _wait_for_summary(folder)
        if problem:
            own_files.replace_file(self._failure_path(run), f"{problem}\n".encode(errors="replace"))
        return problem

    def _execute_command(self, run: PlannedRun, name: str) -> str:
        """Run the command, with the run folder ``name``; return why it has failed, or ""."""
        log = self._folder / "logs" / f"{name}.log"
        own_files.make_folder(log.parent)
        environ = {**process_environ(), **self._plan.env, **self._plan.configurations[run.configuration].env}
        environ |= {
            "EFFICIENTLLM_TAGS": ",".join(tags_of(self._plan, run)),
            "EFFICIENTLLM_RUN_DIR": str(self._folder),
            "EFFICIENTLLM_RUN_NAME": name,
        }
        with os.fdopen(own_files.open_file(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as output:
            try:
                process = subprocess.Popen(
                    command_of(self._plan, run.configuration),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environ,
                    start_new_session=True,  # Ctrl-C reaches the run once, from this process
                    pass_fds=(self._lock,),  # if this process is killed, the run still holds the lock
                )
            except OSError as error:
                return f"not started: {error.strerror}"
            try:
                status = process.wait(self._plan.timeout_s)
            except subprocess.TimeoutExpired:
                _end_processes(process)
                return f"longer than timeout_s ({self._plan.timeout_s:g} s)"
            except KeyboardInterrupt:
                _end_processes(process)
                raise
        return f"exit status {status}; see {log}" if status else ""


def _wait_for_summary(folder: Path) -> str:
    """Wait until the aggregator has completed a run folder, after the training; return why it has not, or ""."""
    deadline_s = time.monotonic() + SUMMARY_WITHIN_S
    while (status := status_of(folder)) in ("", "running"):
        if not folder.exists():
            return f"no run folder {folder.name} was written: it did not measure, or ignored EFFICIENTLLM_RUN_NAME"
        if time.monotonic() > deadline_s:
            return f"the summary is not complete after {SUMMARY_WITHIN_S:g} s"
        time.sleep(0.1)
    return "" if status == "completed" else f"the run has the status {status}"


def _end_processes(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a run: SIGINT first, so that its summary is written, and SIGKILL last, for what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(END_WITHIN_S)
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class WrongPlan(ValueError):
    """A plan cannot be used; the message is one line."""


class ConfigurationPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration: what it adds to the plan's command and environment."""

    args: Words = []
    env: Environ = {}
    command: Words | None = None  # replaces the plan's command


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """A campaign: every configuration is run ``repeats`` times."""

    name: Name
    configurations: Annotated[dict[Name, ConfigurationPlan], Meta(min_length=1, max_length=1000)]
    command: Words = []
    repeats: Annotated[int, Meta(ge=1, le=1000)] = 3
    warmup_runs: Annotated[int, Meta(ge=0, le=100)] = 0  # runs before the first repeat, which are not compared
    cooldown_s: Seconds = 0.0  # pause between two runs
    timeout_s: Annotated[float, Meta(gt=0)] | None = None  # a longer run is ended and has failed
    seed: int = 0  # of the order
    env: Environ = {}
    tags: list[str] = []
    run_dir: str = ""  # parent of the campaign's folder; EFFICIENTLLM_RUN_DIR by default


class PlannedRun(NamedTuple):
    """One run of a campaign."""

    configuration: str
    repeat: int  # from 1; 0 for a warm-up run
    warmup: int  # number of the warm-up run, from 1; 0 for another run

    @property
    def key(self) -> str:
        """Name of the run, and of its folder."""
        return f"warmup-{self.warmup}-{self.configuration}" if self.warmup else f"{self.configuration}-{self.repeat}"


def read_plan(path: Path) -> Plan:
    """Return the plan in a YAML file, whose commands exist; `WrongPlan` has the reason why a file is no plan."""
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise WrongPlan(f"{path}: {error.strerror}") from error
    if len(content) > MAX_PLAN_BYTES:
        raise WrongPlan(f"{path} is larger than {MAX_PLAN_BYTES >> 20} MiB")
    try:
        plan = msgspec.convert(load_yaml(content), Plan)
    except yaml.YAMLError as error:
        raise WrongPlan(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except msgspec.ValidationError as error:
        raise WrongPlan(f"{path}: {_plan_error_text(str(error))}") from error
    for name in plan.configurations:
        words = command_of(plan, name)
        if not words:
            raise WrongPlan(f"{path}: the configuration {name} has no command")
        if shutil.which(words[0]) is None:
            raise WrongPlan(f"{path}: the command {words[0]} of the configuration {name} does not exist")
    times = Counter(run.key for run in order_of(plan))
    if twice := [key for key, count in times.items() if count > 1]:
        raise WrongPlan(f"{path}: two runs would have the name {twice[0]}: rename a configuration")
    return plan


def command_of(plan: Plan, configuration: str) -> list[str]:
    """Return the words of a configuration's command; an open quotation mark is a `WrongPlan`."""
    added = plan.configurations[configuration]
    command = added.command if added.command is not None else plan.command
    return [*_split_words(command), *_split_words(added.args)]


def tags_of(plan: Plan, run: PlannedRun) -> list[str]:
    """Return the tags of a run; a warm-up run has no tag of a configuration, and is not compared."""
    if run.warmup:
        return [*plan.tags, f"{WARMUP}={plan.name}"]
    values = {CAMPAIGN: plan.name, CONFIGURATION: run.configuration, REPEAT: f"{run.repeat}/{plan.repeats}"}
    return [*plan.tags, *(f"{name}={value}" for name, value in values.items())]


def order_of(plan: Plan) -> list[PlannedRun]:
    """Return all runs in order: warm-up runs, then one block per repeat with every configuration in random order.

    In a block, each configuration has about the same temperature and load of the cluster. The order of a block depends
    only on the seed and the number of the block, so a plan can get more repeats later.
    """
    names = sorted(plan.configurations)
    runs = [PlannedRun(names[index % len(names)], 0, index + 1) for index in range(plan.warmup_runs)]
    for repeat in range(1, plan.repeats + 1):
        block = list(names)
        random.Random(f"{plan.seed}/{repeat}").shuffle(block)  # noqa: S311 - not for cryptography
        runs += [PlannedRun(name, repeat, 0) for name in block]
    return runs


def _split_words(command: Words) -> list[str]:
    if isinstance(command, list):
        return command
    try:
        return shlex.split(command)
    except ValueError as error:
        raise WrongPlan(f"{command!r}: {error}") from error


def _plan_error_text(error: str) -> str:
    """Return an error of msgspec with the known keys, or with the reason for the pattern of `Word` and `Environ`."""
    if "unknown field" in error:
        plan_class = ConfigurationPlan if ".configurations[" in error else Plan
        return f"{error}; the known keys are {', '.join(plan_class.__struct_fields__)}"
    return f"no process can get such a text: {error}" if r"\0" in error else error
