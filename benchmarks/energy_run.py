"""Runs the processes of one tool in parallel, each with its own windows."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from benchmarks.energy_judge import Measured, Verdict, judge
from benchmarks.energy_traces import Group

ROOT = Path(__file__).resolve().parent.parent
SETTLE_S = 3.0  # pause between the start of a tool and its first window


@dataclass(frozen=True)
class Length:
    """Windows of similar length: ±10 %, because iterations do not take a whole number of ticks."""

    name: str
    seconds: float
    count: int  # number of windows in each process

    def windows(self, chance: random.Random) -> list[tuple[float, float]]:
        """Return the pause before each window and the window's length, in s."""
        return [(chance.uniform(0.2, 0.6), self.seconds * chance.uniform(0.9, 1.1)) for _ in range(self.count)]


@dataclass(frozen=True)
class Host:
    """The GPUs of one machine, and the environment variables for processes that measure these GPUs."""

    groups: Sequence[Group]
    environ: dict[str, str]


def measure(
    name: str, command: Sequence[str], hosts: Sequence[Host], lengths: Sequence[Length], copies: int, bar: Progress
) -> Measured:
    """Measure all hosts in parallel with one tool, `copies` processes per host, and judge the results."""
    task = bar.add_task(f"{name}: starting", total=None)
    places = [host for _ in range(copies) for host in hosts]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = [_Run(command, place.environ, folder / str(number)) for number, place in enumerate(places)]
        for run in runs:
            stack.callback(run.stop)
        seconds = 0.0
        for number, (run, place) in enumerate(zip(runs, places, strict=True)):
            chance = random.Random(number)  # every tool measures windows with the same lengths and pauses
            blocks = [{"name": length.name, "windows": length.windows(chance)} for length in lengths]
            seconds += sum(sum(window) for block in blocks for window in block["windows"])
            run.send({"gpus": sum(len(group.gpus) for group in place.groups), "blocks": blocks})
        version = [run.receive()["version"] for run in runs][0]  # noqa: RUF015 - all are received
        time.sleep(SETTLE_S)
        bar.update(task, description=name, total=seconds)
        for run in runs:
            run.send({})
        answers = _gather(runs, bar, task)
    bar.update(task, completed=seconds)
    return _judged(name, version, list(zip(places, answers, strict=True)), lengths)


class _Run:
    """A process of a tool."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], complaints: Path) -> None:
        self._complaints = complaints
        read, self._write = os.pipe()
        self._answers = os.fdopen(read)
        with complaints.open("w") as output:
            self._process = subprocess.Popen(
                command,
                env=environ,
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(self._write,),
            )
        os.close(self._write)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.communicate()
        self._answers.close()

    def send(self, orders: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"answers": self._write, **orders}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"a tool has stopped:\n{self._complaints.read_text()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _gather(runs: Sequence[_Run], bar: Progress, task: TaskID) -> list[dict[str, Any]]:
    """Return the last line of each run; the earlier lines advance the progress bar."""
    answers: list[dict[str, Any]] = [{} for _ in runs]

    def listen(number: int) -> None:
        while "rows" not in (answer := runs[number].receive()):
            bar.advance(task, answer["done_s"])
        answers[number] = answer

    threads = [threading.Thread(target=listen, args=(number,)) for number in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(answers):
        raise SystemExit(1)  # the thread of the failed run has printed the reason
    return answers


def _judged(
    name: str, version: str, answers: Sequence[tuple[Host, dict[str, Any]]], lengths: Sequence[Length]
) -> Measured:
    verdicts: dict[tuple[str, str, str], list[Verdict]] = {}
    blocked_s: dict[str, list[float]] = {length.name: [] for length in lengths}
    for host, answer in answers:
        rows = iter(answer["rows"])
        for length in lengths:
            chosen = [next(rows) for _ in range(length.count)]
            for (group, whom), found in judge(chosen, host.groups).items():
                verdicts.setdefault((group, whom, length.name), []).extend(found)
            for begin_ns, begun_ns, end_ns, ended_ns in (row["calls"] for row in chosen):
                blocked_s[length.name].append((begun_ns - begin_ns + ended_ns - end_ns) / 1e9)
    shares = {
        length.name: sum(answer["cpu_shares"][length.name] for _, answer in answers) / len(answers)
        for length in lengths
    }
    return Measured(name, version, verdicts, shares, blocked_s)
