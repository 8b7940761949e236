"""GPUs that are allocated to the job and used by no rank. No I/O.

Only a stated allocation counts.  A GPU counts from the start of the attempt if it was free in every check, else from
the first check in which it was free again; it stops counting when a process uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from effllm.devices.allocation import ranges
from effllm.job.ledger import Ledger
from effllm.job.roster import Roster
from effllm.job.unused_time import NOT_STATED, UNUSED
from effllm.records.allocation import Allocation
from effllm.records.clock import Now
from effllm.records.rank import Event
from effllm.records.wire import Hello

#: GPUs must be free for this time after all ranks have joined, because other processes of the job may start later.
SETTLED_S = 60.0
MAX_HOSTS, MAX_LETTERS = 4, 300  # limits of a text
MAX_TEXTS = 10_000  # after this number of texts, there are no more events
KIND = "gpus_unused"


class EmptyNode(NamedTuple):
    """A node of the allocation on which no rank runs."""

    name: str
    num_gpus: int


class _Host(NamedTuple):
    """The allocation of a host, and the GPUs that its ranks use."""

    name: str
    allocation: Allocation
    used: Collection[str]

    @property
    def unused(self) -> list[str]:
        return [key for key in self.allocation.free if key not in self.used]

    @property
    def is_known(self) -> bool:
        """Whether the allocated GPUs are identified, or all of them are used."""
        return bool(self.allocation.gpus) or self.has_all_used

    @property
    def has_all_used(self) -> bool:
        return len(self.used) >= self.allocation.count

    def text(self, keys: Collection[str]) -> str:
        pairs = zip(self.allocation.gpus, self.allocation.labels, strict=False)
        labels = [label for key, label in pairs if key in keys]
        noun, verb = ("GPU", "is") if len(labels) == 1 else ("GPUs", "are")
        by = f"{verb} allocated ({self.allocation.source}) and used by no rank and no other process"
        return f"host {self.name}: {noun} {ranges(labels)} {by}"


class UnusedWatch:
    """Finds unused GPUs from the HELLOs of the first rank of each host.

    Args:
        ledger: the job's state, which contains the time of unused GPUs.
        roster: the ranks and devices of the job.
        report: is called with each event.
    """

    def __init__(self, ledger: Ledger, roster: Roster, report: Callable[[Event], None]) -> None:
        self._ledger, self._roster, self._report = ledger, roster, report
        self._joined_s: float | None = None  # monotonic time at which all ranks had joined
        self._is_changed = True
        self._hosts: list[_Host] = []
        self.host_names: set[str] = set()  # hosts with ranks, after all ranks have joined
        self._allocations: dict[str, Allocation] = {}  # by host
        self._nodes: Sequence[EmptyNode] = ()
        self._has_nodes = False
        self._nodes_why = ""  # the reason why nodes without ranks are unknown
        self._recorded: set[str] = set()  # texts of earlier events
        self._has_waited = False  # whether all ranks had joined SETTLED_S ago

    @property
    def needs_nodes(self) -> bool:
        """Whether nodes without ranks exist, and are to be listed."""
        return self._has_waited and self.nodes_without_ranks > 0 and not self._has_nodes

    @property
    def nodes_without_ranks(self) -> int:
        """Number of nodes of the allocation on which no rank runs, if the allocation states its nodes."""
        stated = max((one.nodes for one in self._allocations.values()), default=0)
        return max(stated - len(self.host_names), 0)

    @property
    def node_names(self) -> set[str]:
        """The scheduler's names of the hosts with ranks; the host's own name where the scheduler's is unknown."""
        nodes = {host: one.node for host, one in self._allocations.items() if one.node}
        return {nodes.get(host, host) for host in self.host_names}

    def hello(self, message: Hello) -> None:
        """Take the allocation of a host from a HELLO."""
        self._is_changed = True
        if (one := message.allocation) is not None:
            self._ledger.unused.note_busy(set(one.gpus) - set(one.free))

    def set_nodes(self, nodes: Sequence[EmptyNode], why: str = "") -> None:
        """Take the nodes without ranks, or the reason why they are unknown."""
        self._nodes, self._nodes_why = nodes, why
        self._has_nodes = self._is_changed = True

    def tick(self, now: Now) -> None:
        """Update the time of unused GPUs, and report new unused GPUs in one event."""
        if len(self._roster.hellos) < max(self._ledger.world_size, 1):
            if self._is_changed and self._roster.hellos:
                self._ledger.unused.unknown = self._joining()
            self._is_changed = False
            return
        self._joined_s = now.mono_s if self._joined_s is None else self._joined_s
        if not self._has_waited and now.mono_s - self._joined_s >= SETTLED_S:
            self._has_waited = self._is_changed = True
        if not self._is_changed:
            return
        self._is_changed = False
        hellos = self._roster.hellos.values()
        self.host_names = {hello.host for hello in hellos}
        self._allocations = {hello.host: hello.allocation for hello in hellos if hello.allocation is not None}
        self._hosts = self._look()
        time = self._ledger.unused
        found = {f"{host.name}/{key}" for host in self._hosts for key in host.unused}
        found |= {f"{node.name}/{number}" for node in self._nodes for number in range(node.num_gpus)}
        time.unknown = self._unknown(bool(found))
        if not self._has_waited:
            return
        time.update(found, *self._ledger.goodput.span(is_over=False))
        texts = self._texts()
        if texts:
            time.evidence = _few(texts)
        new = [text for text in texts if text not in self._recorded]
        if new and len(self._recorded) < MAX_TEXTS:
            self._recorded.update(new)
            self._report(Event(now.unix_s, KIND, _few(new)))

    def _look(self) -> list[_Host]:
        used: dict[str, set[str]] = {host: set() for host in self._allocations}
        for hello in self._roster.hellos.values():
            if hello.host in used:
                used[hello.host].update(device.key for device in hello.devices if device.is_gpu)
        return [_Host(name, one, used[name]) for name, one in self._allocations.items()]

    def _texts(self) -> list[str]:
        texts = [host.text(host.unused) for host in self._hosts if host.unused]
        return texts + [
            f"node {node.name}: {node.num_gpus} GPUs are allocated, and no rank and no step of the job runs there"
            for node in self._nodes
        ]

    def _joining(self) -> str:
        """Return the reason while ranks are missing, whose GPUs and allocations are not known."""
        hellos = self._roster.hellos
        if all(hello.allocation is None for hello in hellos.values()):
            return NOT_STATED
        return f"{UNUSED}: {len(hellos):,} of {self._ledger.world_size:,} ranks have joined"

    def _unknown(self, has_unused: bool) -> str:
        """Return a sentence if unused GPUs may exist that are not counted, else an empty string."""
        whys = [f"host {one.name}: {one.allocation.why}" for one in self._hosts if not one.is_known]
        if self._hosts and (missing := self.host_names - self._allocations.keys()):
            whys.append(f"no allocation is stated on {len(missing):,} of {len(self.host_names):,} hosts")
        if self.nodes_without_ranks and (self._nodes_why or not self._has_nodes):
            why = self._nodes_why or "scontrol has not answered yet"
            whys.append(f"{self.nodes_without_ranks:,} nodes of the allocation have no rank: {why}")
        if has_unused and not self._has_waited:
            whys.append(f"GPUs are judged {SETTLED_S:.0f} s after all ranks have joined")
        if not self._hosts:
            return NOT_STATED
        return f"{UNUSED}: {_few(whys)}" if whys else ""


def _few(texts: Sequence[str]) -> str:
    more = len(texts) - MAX_HOSTS
    return ("; ".join(texts[:MAX_HOSTS]) + (f"; and {more:,} more" if more > 0 else ""))[:MAX_LETTERS]
