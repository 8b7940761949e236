"""``effllm campaign``: runs every configuration several times, in an interleaved random order.

A run is complete if its run folder says so, and it has failed if there is a file NAME.failed with the reason beside the
run folders; all other runs are still to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from effllm.analysis.campaign_plan import Plan, PlannedRun, WrongPlan, command_of, order_of, read_plan, tags_of
from effllm.analysis.sides import CONFIGURATION
from effllm.commands.output import complain
from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import this_process
from effllm.records.plain_text import one_line
from effllm.store import own_files
from effllm.store.run_lock import status_of
from effllm.store.summary_text import duration

#: Time for a run to end after SIGINT and after SIGTERM, before the next signal.
END_WITHIN_S = 30.0
#: Time for the aggregator to complete the summary after the end of the training.
SUMMARY_WITHIN_S = 60.0


def main(path: Path, *, retry_failed: bool, dry_run: bool) -> int:
    """Run the campaign of a plan; return the exit status."""
    try:
        plan = read_plan(path)
        for run in order_of(plan):
            read_config({"EFFICIENTLLM_TAGS": ",".join(tags_of(plan, run))})
        folder = Path(plan.run_dir or read_config(this_process()).run_dir).absolute() / plan.name
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
    """Lock a campaign; its runs inherit the descriptor and hold the lock, also if the campaign is killed before them.

    Raises:
        WrongPlan: another process runs this campaign.
        OSError: the folder cannot be made or written.
    """
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
    """The runs of a plan that are still to do, with the parent folder of their run folders and a lock they inherit."""

    def __init__(self, plan: Plan, folder: Path, lock: int, *, retry_failed: bool) -> None:
        self._plan, self._folder, self._lock, self._retry_failed = plan, folder, lock, retry_failed
        self._order = order_of(plan)

    def run(self) -> int:
        """Run what is missing; return 1 if a run of the campaign has failed, else 0.

        Raises:
            KeyboardInterrupt: Ctrl-C; the present run has ended.
        """
        waiting = [run for run in self._order if not self._is_done(run)]
        total, done = len(self._order), len(self._order) - len(waiting)
        if done:
            print(f"{done} of {total} runs have ended before; they are not repeated")
        for at, run in enumerate(waiting):
            if at and self._plan.cooldown_s:
                time.sleep(self._plan.cooldown_s)
            print(f"[{done + at + 1}/{total}] {run.key}", flush=True)
            start_s = time.monotonic()
            problem = self._run(run)
            outcome = f"failed: {one_line(problem)}" if problem else "completed"
            print(f"  after {duration(time.monotonic() - start_s)}: {outcome}")
        if failed := [run.key for run in self._order if self._failure(run).exists()]:
            print(f"{len(failed)} of {total} runs failed: {', '.join(failed)}; --retry-failed repeats them")
        print(f"Compare: effllm compare {one_line(str(self._folder))} --by {CONFIGURATION}")
        return int(bool(failed))

    def _is_done(self, run: PlannedRun) -> bool:
        if self._failure(run).exists():
            return not self._retry_failed
        return any(status_of(folder) == "completed" for folder in self._folders(run) if folder.exists())

    def _failure(self, run: PlannedRun) -> Path:
        """Return the path of the file with the reason why a run has failed."""
        return self._folder / f"{run.key}.failed"

    def _folders(self, run: PlannedRun) -> Iterator[Path]:
        """Yield the run folders of a run, and then the folder of its next start."""
        for number in itertools.count():
            folder = self._folder / (f"{run.key}-again-{number}" if number else run.key)
            yield folder
            if not folder.exists():
                return

    def _run(self, run: PlannedRun) -> str:
        """Run one run; return why it has failed, which is also recorded, or "".

        Raises:
            KeyboardInterrupt: Ctrl-C; the run has ended, and is still to do.
        """
        self._failure(run).unlink(missing_ok=True)
        *_, folder = self._folders(run)
        problem = self._execute(run, folder.name) or _problem_of_summary(folder)
        if problem:
            own_files.replace_file(self._failure(run), f"{problem}\n".encode(errors="replace"))
        return problem

    def _execute(self, run: PlannedRun, name: str) -> str:
        log = self._folder / "logs" / f"{name}.log"
        own_files.make_folder(log.parent)
        environ = {**this_process(), **self._plan.env, **self._plan.configurations[run.configuration].env}
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
                    pass_fds=(self._lock,),
                )
            except OSError as error:
                return f"not started: {error.strerror}"
            try:
                status = process.wait(self._plan.timeout_s)
            except subprocess.TimeoutExpired:
                _end(process)
                return f"longer than timeout_s ({self._plan.timeout_s:g} s)"
            except KeyboardInterrupt:
                _end(process)
                raise
        return f"exit status {status}; see {log}" if status else ""


def _problem_of_summary(folder: Path) -> str:
    """Return why a run folder is not complete, or ""; the aggregator may end after the training."""
    until_s = time.monotonic() + SUMMARY_WITHIN_S
    while (status := status_of(folder)) in ("", "running"):
        if not folder.exists():
            return f"no run folder {folder.name} was written: it did not measure, or ignored EFFICIENTLLM_RUN_NAME"
        if time.monotonic() > until_s:
            return f"the summary is not complete after {SUMMARY_WITHIN_S:g} s"
        time.sleep(0.1)
    return "" if status == "completed" else f"the run has the status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a run: first with SIGINT, so that its summary is written."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(END_WITHIN_S)
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
