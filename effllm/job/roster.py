"""The ranks and devices of a job, from their HELLOs. No I/O."""

from __future__ import annotations

import platform
from collections.abc import Collection

from effllm.config.settings import Config
from effllm.job.energy_account import Scope
from effllm.job.job_facts import JobFacts
from effllm.job.ledger import Ledger, RankState
from effllm.job.merged import Expected
from effllm.job.presence import LOST_AFTER_S, Presence
from effllm.records.rank import MAX_DEVICES, Device
from effllm.records.wire import Hello

MAX_RANKS = 2**20


class Roster:
    """The ranks of a job, from their HELLOs."""

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self.config = config
        self._ledger = ledger
        self.presence = Presence(ledger)
        self._whole_model: tuple[int, int] | None = None  # parameters, and the rank that declared them
        self.hellos: dict[int, Hello] = {}  # the last HELLO of each rank
        self.devices: dict[str, Device] = {}  # by key
        self.members: dict[str, set[int]] = {}  # key of a device -> its ranks
        self._num_devices: dict[int, int] = {}  # by rank
        self._all_ranks: list[int] = []  # cache of `all_ranks`
        self._without_device: set[int] = set()  # ranks without a computing device
        self._job: JobFacts | None = None  # cache of `job`
        self._expected_cache: tuple[set[int], Expected] | None = None  # ranks that left, and `expected_devices` then

    @property
    def job(self) -> JobFacts:
        """The facts of the job, from the HELLOs so far."""
        if self._job is None:
            rank = self._whole_model[1] if self._whole_model is not None else None
            self._job = JobFacts(self.config, self._ledger, self.hellos, self.devices, self.members, rank)
        return self._job

    @property
    def all_ranks(self) -> list[int]:
        """All ranks of the world; the same list in every window."""
        if len(self._all_ranks) != self._ledger.world_size:
            self._all_ranks = list(range(self._ledger.world_size))
        return self._all_ranks

    def fix_scope(self, scope: Scope) -> None:
        """Fix the power scope of the job's sums, even if other sensors join later."""
        if scope.label and not self._ledger.scope:
            self._ledger.scope = scope.choice
            self._job = None  # its scope has changed

    def rejection_reason(self, message: Hello, now_s: float) -> str:
        """Return the reason why a HELLO is rejected, or an empty string."""
        ledger = self._ledger
        if ledger.job and message.job and message.job != ledger.job:
            return "the agent belongs to another job"
        if message.world_size > MAX_RANKS:
            return f"a world of {message.world_size} ranks exceeds the limit of {MAX_RANKS}"
        if not 0 <= message.rank < message.world_size:
            return f"rank {message.rank} lies outside a world of {message.world_size}"
        if ledger.world_size and message.world_size != ledger.world_size:
            return f"the agent's world has {message.world_size} ranks, but the job has {ledger.world_size} ranks"
        if message.log_interval != self.config.log_interval:
            return f"LOG_INTERVAL is {message.log_interval} for this rank, but {self.config.log_interval} for the job"
        first = next(iter(self.hellos.values()), message)
        if message.offset % message.log_interval != first.offset % first.log_interval:
            return f"the first iteration is {message.offset} on this rank, but {first.offset} on rank {first.rank}"
        new_keys = {device.key for device in message.devices if message.rank not in self.members.get(device.key, ())}
        if self._num_devices.get(message.rank, 0) + len(new_keys) > MAX_DEVICES:
            return f"the rank has reported more than {MAX_DEVICES} devices"
        earlier = ledger.ranks.get(message.rank)
        heard_s = self.presence.heard_s.get(message.rank)
        if earlier and earlier.agent != message.agent and not earlier.bye and heard_s is not None:
            return f"rank {message.rank} already has an agent" if now_s - heard_s < LOST_AFTER_S else ""
        return ""

    def admit(self, message: Hello, now_s: float) -> bool:
        """Accept a HELLO without `rejection_reason`; return whether the agent is new."""
        ledger = self._ledger
        ledger.job = ledger.job or message.job
        ledger.world_size = ledger.world_size or message.world_size
        self.presence.note_hello(now_s)
        earlier = ledger.ranks.get(message.rank)
        is_new = earlier is None or earlier.agent != message.agent
        if is_new:
            if earlier is not None:
                ledger.spent.add_agent(earlier)
            ledger.ranks[message.rank] = RankState(message.agent, last_window=earlier.last_window if earlier else 0)
        last_hello, self.hellos[message.rank] = self.hellos.get(message.rank), message
        if last_hello is not None and not is_new:  # the rank's process may use other GPUs now
            for key in {device.key for device in last_hello.devices} - {device.key for device in message.devices}:
                self.members[key].discard(message.rank)  # `_num_devices` still counts it, because its sums stay
                if not self.members[key]:
                    del self.members[key], self.devices[key]
        for device in message.devices:
            earlier_device = self.devices.get(device.key)
            # Only one rank per host reads the power sensor, and only its HELLO has the method.
            if earlier_device is None or earlier_device.energy_method is None or device.energy_method is not None:
                self.devices[device.key] = device
            members = self.members.setdefault(device.key, set())
            if message.rank not in members:
                members.add(message.rank)
                self._num_devices[message.rank] = self._num_devices.get(message.rank, 0) + 1
        self._without_device.discard(message.rank)
        if all(device.only_power for device in message.devices):
            self._without_device.add(message.rank)
        self._job = self._expected_cache = None
        return is_new

    def record_unused_gpus(self) -> list[str]:
        """Record the unused GPUs of the attempt, once, when all ranks have joined; return a sentence for each node."""
        attempt, nodes = self._ledger.goodput.attempt, self.job.node_gpus
        if attempt.unused_gpus is not None or not nodes:
            return []
        attempt.unused_gpus = sum(node.unused for node in nodes)
        return [node.text for node in nodes if node.unused]

    def state_of(self, rank: int, agent: str) -> RankState | None:
        """Return the state of a rank, if this is its agent."""
        state = self._ledger.ranks.get(rank)
        return state if state is not None and state.agent == agent else None

    def is_too_late(self, message: Hello) -> bool:
        """Whether a HELLO after the end of rank 0's trainer is probably from the next attempt.

        A late HELLO of this attempt is possible if the trainer completed, or ended before rank 0's agent joined.
        """
        rank_0 = self._ledger.ranks.get(0)
        has_joined = self.state_of(message.rank, message.agent) is not None
        return not has_joined and rank_0 is not None and rank_0.bye != "completed"

    def missing_ranks(self, reporting: Collection[int]) -> set[int]:
        """Return the ranks of the world that have not left and do not report."""
        if len(reporting) == self._ledger.world_size:
            return set()
        return set(range(self._ledger.world_size)).difference(reporting) - self.presence.left_ranks

    def expected_devices(self, reporting: Collection[int]) -> Expected:
        """Return the devices that a window should have: not those whose ranks have all left without reporting in it."""
        gone = self.presence.left_ranks.difference(reporting)
        if self._expected_cache is None or self._expected_cache[0] != gone:
            hosts = {hello.host for rank, hello in self.hellos.items() if rank not in gone}
            keys = (
                key
                for key, ranks in self.members.items()
                # A sensor of a node counts even if its rank has left.
                if not ranks <= gone or (self.devices[key].only_power and self.hellos[min(ranks)].host in hosts)
            )
            self._expected_cache = gone, Expected((key, self.devices[key]) for key in keys)
        return self._expected_cache[1]

    def has_lost_host(self) -> bool:
        """Whether all ranks of a host other than the aggregator's have ended without a BYE."""
        with_bye = self.presence.left_ranks
        hosts = {hello.host for hello in self.hellos.values()} - {platform.node()}
        return not hosts <= {hello.host for rank, hello in self.hellos.items() if rank in with_bye}

    def ranks_by_device(self, reporting: Collection[int]) -> dict[str, set[int]]:
        """Return the ranks of each of the `expected_devices`, without ranks that left and did not report."""
        gone = self.presence.left_ranks.difference(reporting)
        return {key: self.members[key] - gone for key in self.expected_devices(reporting)} if gone else self.members

    def ranks_without_device(self, reporting: Collection[int]) -> set[int]:
        """Return the ranks without a computing device that report or have not left."""
        return self._without_device - self.presence.left_ranks.difference(reporting)

    def note_parameters(self, message: Hello) -> str:
        """Record the parameters of the whole model, if a HELLO has them; return a text if another rank has others."""
        total = message.parameters.total
        if message.parameters.is_share or total is None:
            return ""
        if self._whole_model is None or self._whole_model[1] == message.rank:
            self._whole_model = (total, message.rank)
            self._job = None
        first_total, first_rank = self._whole_model
        if first_total == total:
            return ""
        return (
            f"ranks {first_rank} and {message.rank} disagree on the parameters of the whole model"
            f": {first_total:,} and {total:,}; rank {first_rank}'s count is used"
        )
