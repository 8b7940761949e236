"""``effllm campaign``: runs every configuration several times, in an interleaved random order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from effllm.analysis.campaign_journal import COMPLETED, FAILED, INTERRUPTED, STARTED, CampaignJournal, JournalLine
from effllm.analysis.campaign_plan import (
    Plan,
    PlannedRun,
    WrongPlan,
    command_of,
    fingerprint,
    order_of,
    read_plan,
    tags_of,
)
from effllm.analysis.sides import CONFIGURATION
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


class Ended(NamedTuple):
    """The end of a process."""

    status: str
    exit_status: int | None
    reason: str = ""


def main(path: Path, *, retry_failed: bool, dry_run: bool) -> int:
    """Run the campaign of a plan; return the exit status."""
    try:
        import yaml  # noqa: F401
    except ImportError:
        return fail("this command needs PyYAML: pip install 'effllm[analysis]'")
    try:
        plan = read_plan(path)
        for run in order_of(plan):
            read_config({"EFFICIENTLLM_TAGS": ",".join(tags_of(plan, run))})
        folder = Path(plan.run_dir or read_config(this_process()).run_dir).absolute() / plan.name
        if dry_run:
            _print_order(plan)
            return 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.closing(CampaignJournal(folder)) as journal:
            return Campaign(plan, folder, journal, retry_failed=retry_failed).run()
    except (WrongPlan, ConfigError) as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename or path}: {error.strerror}")
    except KeyboardInterrupt:
        print(f"effllm campaign: interrupted; continue with: effllm campaign {one_line(str(path))}", file=sys.stderr)
        return 130


def fail(line: str) -> int:
    print(f"effllm campaign: {one_line(line)}", file=sys.stderr)
    return 2


def _print_order(plan: Plan) -> None:
    for run in order_of(plan):
        print(one_line(f"{run.key}: {' '.join(command_of(plan, run.configuration))}"))


class Campaign:
    """The runs of a plan that the journal does not have.

    Args:
        plan: the plan.
        folder: parent folder of the run folders.
        journal: of this folder.
        retry_failed: whether failed runs are started again.
    """

    def __init__(self, plan: Plan, folder: Path, journal: CampaignJournal, *, retry_failed: bool) -> None:
        self._plan, self._folder, self._journal = plan, folder, journal
        self._fingerprints = fingerprint(plan)
        self._done = (COMPLETED,) if retry_failed else (COMPLETED, FAILED)
        self._order = order_of(plan)
        self._check_same_commands()

    def run(self) -> int:
        """Run what is missing; return 1 if a run of the campaign has failed, else 0.

        Raises:
            KeyboardInterrupt: Ctrl-C; the present run has ended.
        """
        self._adopt()
        waiting = [run for run in self._order if not self._is_done(run)]
        total = len(self._order)
        if len(waiting) < total:
            print(f"{total - len(waiting)} of {total} runs are complete; their results are kept")
        for at, run in enumerate(waiting):
            if at and self._plan.cooldown_s:
                time.sleep(self._plan.cooldown_s)
            left = self._remaining_s(waiting[at:])
            remaining = "" if left is None else f"; remaining: about {duration(left)}"
            print(f"[{total - len(waiting) + at + 1}/{total}] {run.key}{remaining}", flush=True)
            line = self._run(run)
            print(
                f"  {line.status} after {duration(line.seconds)}{f': {one_line(line.reason)}' if line.reason else ''}"
            )
            if line.status == INTERRUPTED:
                raise KeyboardInterrupt
        return self._close()

    def _adopt(self) -> None:
        """Record the runs that completed after the campaign was killed."""
        for run in self._order:
            line = self._journal.last(run.key)
            mark = self._fingerprints[run.configuration]
            if line is None or line.status != STARTED or line.fingerprint != mark:
                continue
            summary = self._folder / line.folder / "summary.json"
            if line.folder and status_of(summary.parent) == COMPLETED:
                seconds = max(summary.stat().st_mtime - line.time_s, 0.0)
                about = (line.folder, seconds, None, "the exit status was not seen")
                self._journal.add(JournalLine(run.key, COMPLETED, time.time(), mark, *about))

    def _check_same_commands(self) -> None:
        for run in self._order:
            line = self._journal.last(run.key)
            if line and line.status in self._done and line.fingerprint != self._fingerprints[run.configuration]:
                raise WrongPlan(
                    f"the configuration {run.configuration} has changed since its run {run.key}: give the plan another "
                    f"name, or remove {self._folder}"
                )

    def _is_done(self, run: PlannedRun) -> bool:
        line = self._journal.last(run.key)
        return line is not None and line.status in self._done

    def _run(self, run: PlannedRun) -> JournalLine:
        start_s, unix_s = time.monotonic(), time.time()
        started = self._journal.starts(run.key)
        name = run.key if not started else f"{run.key}-again-{started}"
        mark = self._fingerprints[run.configuration]
        self._journal.add(JournalLine(run.key, STARTED, unix_s, mark, name))
        ended = self._execute(run, name)
        seconds = time.monotonic() - start_s
        if ended.status == COMPLETED:
            ended = _measured(self._folder / name, ended)
        line = JournalLine(run.key, ended.status, time.time(), mark, name, seconds, ended.exit_status, ended.reason)
        self._journal.add(line)
        return line

    def _execute(self, run: PlannedRun, name: str) -> Ended:
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
                    pass_fds=(self._journal.descriptor,),
                )
            except OSError as error:
                return Ended(FAILED, None, f"not started: {error.strerror}")
            try:
                status = process.wait(self._plan.timeout_s)
            except subprocess.TimeoutExpired:
                _end(process)
                return Ended(FAILED, process.returncode, f"longer than timeout_s ({self._plan.timeout_s:g} s)")
            except KeyboardInterrupt:
                _end(process)
                return Ended(INTERRUPTED, process.returncode)
        return Ended(COMPLETED, 0) if status == 0 else Ended(FAILED, status, f"exit status {status}; see {log}")

    def _remaining_s(self, waiting: list[PlannedRun]) -> float | None:
        """Return an estimate from the completed runs of each configuration; ``None`` before the first."""
        every = self._journal.durations_s([run.key for run in self._order])
        if not every:
            return None
        own: dict[str, list[float]] = {}
        for run in self._order:
            own.setdefault(run.configuration, []).extend(self._journal.durations_s([run.key]))
        total = self._plan.cooldown_s * (len(waiting) - 1)
        for name, count in Counter(run.configuration for run in waiting).items():
            known = own[name] or every
            total += count * sum(known) / len(known)
        return total

    def _close(self) -> int:
        failed = [run.key for run in self._order if not self._is_completed(run)]
        if failed:
            print(f"{len(failed)} of {len(self._order)} runs failed: {', '.join(failed)}; --retry-failed repeats them")
        print(f"Compare: effllm compare {one_line(str(self._folder))} --by {CONFIGURATION}")
        return int(bool(failed))

    def _is_completed(self, run: PlannedRun) -> bool:
        line = self._journal.last(run.key)
        return line is not None and line.status == COMPLETED


def _measured(folder: Path, ended: Ended) -> Ended:
    """Wait until the summary of a run is complete: the aggregator may end after the training."""
    until_s = time.monotonic() + SUMMARY_WITHIN_S
    while (status := status_of(folder)) in ("", "running"):
        if time.monotonic() > until_s or not folder.exists():
            reason = (
                f"the summary is not complete after {SUMMARY_WITHIN_S:g} s"
                if status
                else f"no run folder {folder.name} was written: the command did not measure, or chose another folder"
            )
            return Ended(FAILED, ended.exit_status, reason)
        time.sleep(0.1)
    return ended if status == COMPLETED else Ended(FAILED, ended.exit_status, f"the run has the status {status}")


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
