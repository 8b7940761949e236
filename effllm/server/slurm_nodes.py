"""The nodes of a Slurm job without a rank, from one call of scontrol in a child process that is polled."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from typing import IO

from effllm.job.unused import EmptyNode, UnusedWatch

#: scontrol may wait for a busy controller; after this time it is killed.
DEADLINE_S = 30.0
#: The loop of the aggregator waits for a killed scontrol for at most this time.
KILLED_WITHIN_S = 0.1
#: Larger answers are cut: the detail of a node has about 60 bytes.
MAX_ANSWER_BYTES = 4 * 2**20
MAX_NODES = 10_000
_SCRIPT = 'scontrol --oneliner --details show job "$1" && scontrol --oneliner show step "$1"'
_DETAIL = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_STEP = re.compile(r"^StepId=\S+?\.(\S+) .*?\bNodeList=(\S+)", re.MULTILINE)
_GPUS = re.compile(r"\bgpu(?::([^:(,]+))?:(\d+)")
#: The type of a MIG slice in slurm.conf has a profile, such as a100_3g.20gb (https://slurm.schedmd.com/gres.html).
_SLICE = re.compile(r"\d+g\.\d+gb", re.IGNORECASE)
MAX_GPUS = 64  # of a node; with a larger number the allocation is unknown
MAX_DIGITS = 10  # of a number in a list of nodes
#: Steps that run on nodes without a program of the user.
_OWN_STEPS = ("batch", "extern", "interactive")


class SlurmNodes:
    """Asks scontrol once, if the job's allocation has nodes without ranks.

    Args:
        environ: the environment of this process.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._job = environ.get("SLURM_JOB_ID", "").strip()
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None
        self._until_s = 0.0
        self.is_asked = False

    def tick(self, unused: UnusedWatch, now_s: float) -> None:
        """Ask scontrol if there are nodes without ranks, and pass its answer on."""
        if unused.needs_nodes and (found := self.poll(unused.node_names, now_s)) is not None:
            unused.set_nodes(*found)

    def poll(self, hosts: Collection[str], now_s: float) -> tuple[list[EmptyNode], str] | None:
        """Start scontrol, or return its answer: the nodes without ranks, and the reason why they are unknown.

        Args:
            hosts: the names of the nodes with ranks.
            now_s: monotonic time.

        Returns:
            ``None`` while scontrol runs, and after the answer was returned.
        """
        if not self.is_asked:
            self.is_asked = True
            return self._start(now_s)
        if self._process is None or (self._process.poll() is None and now_s < self._until_s):
            return None
        status, text = self._end()
        if status != 0:
            return [], "scontrol gave no answer in time" if status is None else f"scontrol failed with status {status}"
        return nodes_without_ranks(text, hosts)

    def close(self) -> None:
        """End a running scontrol."""
        if self._process is not None:
            self._end()

    def _start(self, now_s: float) -> tuple[list[EmptyNode], str] | None:
        if not self._job.isdecimal():
            return [], "the aggregator has no SLURM_JOB_ID"
        self._until_s = now_s + DEADLINE_S
        try:
            self._answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_end`
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "sh", self._job],
                stdin=subprocess.DEVNULL,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:  # also without a folder for temporary files
            if self._answer is not None:
                self._answer.close()
            return [], f"scontrol cannot be started: {error}"
        return None

    def _end(self) -> tuple[int | None, str]:
        """Return the status, ``None`` if the deadline has passed, and the answer."""
        assert self._process is not None
        assert self._answer is not None
        status = self._process.poll()
        if status is None:
            _kill(self._process)
        self._answer.seek(0)
        text = self._answer.read(MAX_ANSWER_BYTES).decode(errors="replace")
        self._answer.close()
        self._process = None
        return status, text


def nodes_without_ranks(text: str, hosts: Collection[str]) -> tuple[list[EmptyNode], str]:
    """Return the nodes of a job on which neither a rank nor another step runs, from the answer of scontrol.

    Args:
        text: details of the job, and its steps.
        hosts: the names of the nodes with ranks; only the part before the first dot is compared.

    Returns:
        The nodes, and the reason if nodes are unknown.
    """
    short = set(map(_short, hosts))
    gpus: dict[str, int] = {}
    sliced: set[str] = set()
    for names, gres in _DETAIL.findall(text):
        kinds = _GPUS.findall(gres)
        count = sum(int(number[:MAX_DIGITS]) for _, number in kinds)
        for name in map(_short, hosts_of(names)):
            gpus[name] = gpus.get(name, 0) + count
            if any(_SLICE.search(kind) for kind, _ in kinds):
                sliced.add(name)
    if not short <= gpus.keys():
        return [], "the names of nodes in scontrol and of hosts differ"
    lists = [names for step, names in _STEP.findall(text) if step not in _OWN_STEPS]
    with_steps = {_short(name) for names in lists for name in hosts_of(names)}
    empty = gpus.keys() - short
    if busy := empty & with_steps:
        return [], f"other steps of the job run on {len(busy):,} of these nodes"
    if slices := empty & sliced:
        return [], f"slices of GPUs (MIG) are allocated on {len(slices):,} of these nodes"
    if any(gpus[name] > MAX_GPUS for name in empty):
        return [], f"scontrol lists more than {MAX_GPUS} GPUs on a node"
    return [EmptyNode(name, gpus[name]) for name in sorted(empty)[:MAX_NODES] if gpus[name]], ""


def _short(name: str) -> str:
    return name.partition(".")[0]


def hosts_of(names: str) -> Iterator[str]:
    """Yield the names in a list of Slurm: ``a[1-2,05],b`` is a1, a2, a05 and b; ranges keep leading zeros."""
    for name in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", names):
        yield from _expanded(name)


def _expanded(name: str) -> Iterator[str]:
    head, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    inside, _, tail = rest.partition("]")
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or max(len(first), len(last)) > MAX_DIGITS:
            continue
        for number in range(int(first), min(int(last or first), int(first) + MAX_NODES) + 1):
            for end in _expanded(tail):
                yield f"{head}{number:0{len(first)}d}{end}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the shell and scontrol
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a call of a hanging file system ends later
        process.wait(KILLED_WITHIN_S)
