"""The table of faults in docs/reliability.md: the promise for each fault, and the results of its tests.

    python -m pytest -m fault --reliability   # writes the page with the new results of all tests
    python -m tests.reliability               # writes the page from the kept results

A test has the mark ``@pytest.mark.fault("aggregator-sigkill")``, with several names if it tests several faults. Tests
that are not executed keep their last result.
"""

from __future__ import annotations

import ast
import json
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KNOWN = Path(__file__).with_suffix(".json")
PAGE = HERE.parent / "docs" / "reliability.md"
RESULTS = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Fault:
    """A fault, and the promise of effllm for it."""

    title: str
    promise: str


FAULTS = {
    "aggregator-sigkill": Fault(
        "the aggregator is killed, again and again",
        "agents keep their windows; another aggregator continues on the same port; no token is lost",
    ),
    "agent-killed": Fault(
        "an agent is killed (SIGKILL, out of memory)",
        "the rank is reported missing after three heartbeats; other ranks are reported",
    ),
    "trainer-stopped": Fault(
        "a trainer hangs (SIGSTOP, a collective that never ends)",
        "the agent still reports the position of the loop, the duration of the hang, utilization and power; the "
        "position of each rank is listed",
    ),
    "network-cut": Fault(
        "the network drops everything, then recovers",
        "memory is bounded; kept reports arrive, dropped reports are counted",
    ),
    "slow-disk": Fault(
        "the disk or network file system of the run folder stalls",
        "reports are still received, and other sinks still write; windows are written when the disk recovers",
    ),
    "descriptors": Fault(
        "the aggregator runs out of file descriptors",
        "if the limit is too low for the world, the job is rejected in one line with the required number; later, no "
        "new peer is admitted until some are free, and one line reports it",
    ),
    "descriptors-closed": Fault(
        "the script closes all descriptors after the start, and opens its own",
        "no descriptor of the script is written or closed; all iterations are counted",
    ),
    "hostile-frames": Fault(
        "garbage and hostile frames arrive",
        "they are rejected and counted, and end no process; memory is bounded",
    ),
    "duplicates": Fault(
        "reports arrive twice, late or from an earlier start",
        "each window is counted once; late windows correct the totals",
    ),
    "wall-clock": Fault(
        "the wall clock steps by an hour during a run",
        "durations, energies and totals do not change",
    ),
    "elastic-restart": Fault(
        "the job restarts with fewer or more ranks",
        "the run folder is the same, with a new attempt; redone iterations are counted as redone",
    ),
    "forked-worker": Fault(
        "the trainer forks (DataLoader workers)",
        "child processes record nothing, hold no port and end no process",
    ),
    "exits": Fault(
        "a trainer ends: normally, by sys.exit, an exception, SIGTERM, SIGINT, os._exit, SIGKILL",
        "its last iteration and its status are recorded; no process is left; the end takes at most 5 s",
    ),
    "device-lost": Fault(
        "a GPU falls off the bus, or its driver hangs",
        "values are not measured, with the reason; a GPU that returns is read again; nothing is counted twice",
    ),
    "ten-thousand": Fault(
        "ten thousand ranks report to one aggregator",
        "all reports are received and counted to the last token, in bounded memory; docs/scale.md has the cost",
    ),
    # further faults
    "disk-full": Fault(
        "the disk of the run folder is full",
        "one line reports it; no line or summary is incomplete; windows are written when the disk has room, else "
        "counted as lost",
    ),
    "read-only": Fault(
        "the file system of the run folder becomes read-only, and writable again",
        "the same as for a full disk",
    ),
    "folder-removed": Fault(
        "the run folder of a running job is removed",
        "one line reports it; the folder is made again and later windows are written",
    ),
    "aggregator-by-hand": Fault(
        "the aggregator is started again by hand on the same run",
        "it continues the folder and the totals; agents reconnect",
    ),
    "agent-cannot-start": Fault(
        "an agent cannot be started",
        "one line has the reason; training goes on without metrics of this rank",
    ),
    "worker-killed": Fault(
        "torchrun --max-restarts, with a worker killed",
        "attempt 2 continues the same folder; lost iterations are counted as redone",
    ),
    "rank-0-moves": Fault(
        "rank 0 starts again on another host",
        "the agents connect to the new host; the folder is continued",
    ),
    "two-jobs": Fault(
        "two jobs on one node",
        "each job has its own aggregator and folder; no rank is counted in the wrong job",
    ),
    "clock-off": Fault(
        "the clock of one node is an hour off",
        "windows, durations and verdicts do not change",
    ),
    "scheduler-stop": Fault(
        "the scheduler stops the job: SIGTERM to all, SIGKILL after 5 s",
        "the folder is complete up to the last iteration; its status is killed",
    ),
    "everything-killed": Fault(
        "everything is killed at once, agents and aggregator too",
        "the written files can be read and lack at most the last window; the next start continues them",
    ),
    "memory-limit": Fault(
        "the memory limit of the container is reached",
        "the kernel ends agents and aggregator, and not the trainer; at the end one line reports a lost agent",
    ),
    "late-aggregator": Fault(
        "the aggregator starts later than a short job ends, or has much to write at its end",
        "agents keep their reports for up to 30 s after the job's end, without keeping the launcher; where Slurm or"
        " a container ends all processes earlier, these reports are missing, and the totals say so",
    ),
    "no-threads": Fault(
        "the job may start no further thread or has no memory left (pids.max, ulimit -v)",
        "one line has the reason; training goes on without metrics",
    ),
    "tmpfs-full": Fault(
        "/dev/shm or /tmp of the container is full, or it has no memory for the ring",
        "metrics work without these folders, or are off with one line",
    ),
    "stopped-terminal": Fault(
        "the terminal is stopped (Ctrl-S), or not read",
        "only the console waits; dropped lines are counted",
    ),
    "one-core": Fault(
        "agents share one core with their trainer",
        "agents lower their own priority; devices are still sampled",
    ),
    "slurm": Fault(
        "plain srun, and scancel",
        "all ranks are in one run folder; a cancelled job has the status killed",
    ),
    "mpirun": Fault(
        "plain mpirun (Open MPI), on one or two hosts, and a rank that dies",
        "all ranks are in one run folder, with keys between hosts; a job that mpirun ends has the status killed",
    ),
    "slow-network": Fault(
        "latency and loss on the network",
        "totals are exact; no iteration waits",
    ),
    "host-lost": Fault(
        "a host is lost permanently",
        "its ranks are reported missing; other ranks are reported; the job ends",
    ),
    "unauthenticated-peers": Fault(
        "peers connect without the key, with the key of another job, or in a flood",
        "they are rejected and counted, and one event reports this; no window is delayed by more than 1 s",
    ),
}


@cache
def marked() -> dict[str, list[str]]:
    """Read the marks from the source files; return for each fault its tests, as ``file.py::function``."""
    found: dict[str, list[str]] = {name: [] for name in FAULTS}
    for path in sorted(HERE.rglob("test_*.py")):
        text = path.read_text()
        if ".fault(" not in text:
            continue
        body = ast.parse(text).body
        of_module = [name for node in body if isinstance(node, ast.Assign) for name in _marks(node)]
        for test in body:
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                of_test = [name for decorator in test.decorator_list for name in _marks(decorator)]
                for name in dict.fromkeys([*of_module, *of_test]):
                    found.setdefault(name, []).append(f"{path.relative_to(HERE)}::{test.name}")
    return found


def _marks(node: ast.AST) -> list[str]:
    return [
        str(argument.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "fault"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]


def known() -> dict[str, Any]:
    """Return the results of earlier runs."""
    return json.loads(KNOWN.read_text()) if KNOWN.exists() else {}


def record(results: Mapping[str, Mapping[str, dict[str, int]]]) -> None:
    """Record the number of passed, failed and skipped runs of each test, by fault."""
    kept = known()
    ran_on = {"python": ".".join(platform.python_version_tuple()[:2]), "kernel": _kernel()}
    for fault, tests in results.items():
        for test, counts in tests.items():
            kept.setdefault(fault, {})[test] = {**counts, **ran_on}
    there = marked()
    kept = {
        fault: {test: kept[fault][test] for test in sorted(kept[fault]) if test in there[fault]}
        for fault in FAULTS
        if fault in kept
    }
    KNOWN.write_text(json.dumps(kept, indent=2) + "\n")
    PAGE.write_text(page())


def _kernel() -> str:
    return f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"


def page() -> str:
    """Return the page."""
    results = known()
    lines = [
        "# Reliability",
        "",
        "What happens to the job and to the measurement if something fails. In every row, training has the same step",
        "time as before, all measurements that could be kept are in the run folder, lost reports are counted in",
        "`summary.json`, and no process and no temporary file is left.",
        "",
        "| fault | promise | tests that passed |",
        "|---|---|---|",
    ]
    lines += [_row(fault, results.get(name, {})) for name, fault in FAULTS.items()]
    lines += [
        "",
        "The tests use real processes, signals, disks and networks, and simulated devices with a known energy:",
        f"{_ran_on(results)}. Each test names its fault: `grep -rn 'fault(' tests`;",
        "`tests/reliability.json` has each test with its result. The tests write this table:",
        "`python -m pytest -m fault --reliability`. Not measured on a GPU.",
    ]
    return "\n".join(lines) + "\n"


def _row(fault: Fault, results: Mapping[str, Mapping[str, Any]]) -> str:
    return f"| {fault.title} | {fault.promise} | {_result(results.values())} |"


def _ran_on(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    ran = sorted({f"Python {one['python']}, {one['kernel']}" for tests in results.values() for one in tests.values()})
    return f"last run with {'; '.join(ran)}"


def _result(results: Collection[Mapping[str, Any]]) -> str:
    counts = {result: sum(one.get(result, 0) for one in results) for result in RESULTS}
    others = [f"{counts[result]} {result}" for result in RESULTS[1:] if counts[result]]
    return ", ".join([str(counts["passed"]), *others])


# --- the plugin of pytest, which conftest.py names ---


def pytest_addoption(parser: Any) -> None:
    """Declare the switch."""
    parser.addoption("--reliability", action="store_true", help="write docs/reliability.md with the results")


def pytest_configure(config: Any) -> None:
    """With --reliability, register the counter; with several test processes, only the controller counts."""
    if config.getoption("--reliability"):
        config.pluginmanager.register(_Counter(is_worker=hasattr(config, "workerinput")), "reliability-counter")


FAULT = "fault"


class _Counter:
    def __init__(self, is_worker: bool) -> None:
        self._is_worker = is_worker
        self._results: dict[str, dict[str, dict[str, int]]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            # pytest-xdist sends user properties with each report to the controller.
            item.user_properties += [(FAULT, name) for mark in item.iter_markers(FAULT) for name in mark.args]

    def pytest_runtest_logreport(self, report: Any) -> None:
        is_counted = (
            report.when == "call" or report.outcome != "passed"
        )  # for set-up and tear-down, only failures and skips are counted
        if not is_counted or self._is_worker:
            return
        file, _, function = report.nodeid.partition("@")[0].partition("[")[0].partition("::")
        test = f"{Path(file).relative_to('tests')}::{function}"
        for fault in [value for name, value in report.user_properties if name == FAULT]:
            counts = self._results.setdefault(fault, {}).setdefault(test, {})
            counts[report.outcome] = counts.get(report.outcome, 0) + 1

    def pytest_sessionfinish(self) -> None:
        if not self._is_worker:
            record(self._results)


if __name__ == "__main__":
    PAGE.write_text(page())
