"""Who belongs to the job: its ranks, what they introduced themselves with, and who is still heard; pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

from effllm import hardware
from effllm.aggregation.ledger import Ledger, RankState
from effllm.aggregation.merged import Expected
from effllm.config import Config
from effllm.energy.lag_evidence import is_share_open
from effllm.energy.power_scope import AUTO, Node, Scope, choose, keep, scopes
from effllm.runs.plain_text import one_line
from effllm.schema import METHODS, MOST_DEVICES, Device, Hello

SILENT_AFTER_S = 15.0  # three beats: a rank that says nothing for so long is waited for no more
ABSENT_AFTER_S = 30.0  # a rank that never joined; starting a large job takes its time
ABSENT_AFTER_BYE_S = 2.0  # ... but once ranks leave, nobody joins any more
MOST_RANKS = 2**20


Said = TypeVar("Said")


def _remembered(ask: Callable[[Roster], Said]) -> Callable[[Roster], Said]:
    """Ask all ranks or devices once for what each window needs; introductions make it forgotten."""

    @wraps(ask)
    def answer(self: Roster) -> Said:
        if ask.__name__ not in self.memory:
            self.memory[ask.__name__] = ask(self)
        said: Said = self.memory[ask.__name__]
        return said

    return answer


class Roster:
    """The ranks of a job by their introductions.

    Args:
        config: the job's settings.
        ledger: the job's state, whose ranks are kept here.
    """

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self.config = config
        self._ledger = ledger
        self._heard_s: dict[int, float] = {}
        self._silent: set[int] = set()
        self._left = sum(bool(rank.bye) for rank in ledger.ranks.values())
        self._first_hello_s: float | None = None
        self._first_bye_s: float | None = None
        self._whole_model: tuple[int, int] | None = None  # parameters of the whole model, and the rank that said so
        self.hellos: dict[int, Hello] = {}
        self.devices: dict[str, Device] = {}
        self.members: dict[str, set[int]] = {}  # the ranks that sit on each device
        self._num_devices: dict[int, int] = {}  # of each rank
        self.memory: dict[str, Any] = {}  # what introductions come to
        self._blind: set[int] = set()
        self._last_behind: int | None = None
        self._chance = random.Random(0)  # noqa: S311 - hides nothing
        self._expected: tuple[set[int], Expected] | None = None  # the ranks that are gone, and what is left

    # --- who comes, is heard, and goes ---

    def objection(self, message: Hello, now_s: float) -> str:
        """Return why an introduction is refused, or an empty string."""
        state = self._ledger
        if state.job and message.job and message.job != state.job:
            return "it belongs to another job"
        if message.world_size > MOST_RANKS:
            return f"a world of {message.world_size} ranks is beyond reason"
        if not 0 <= message.rank < message.world_size:
            return f"rank {message.rank} lies outside a world of {message.world_size}"
        if state.world_size and message.world_size != state.world_size:
            return f"its world has {message.world_size} ranks, the job's has {state.world_size}"
        if message.log_interval != self.config.log_interval:
            return f"its LOG_INTERVAL is {message.log_interval}, the job's is {self.config.log_interval}"
        first = next(iter(self.hellos.values()), message)
        if message.offset % message.log_interval != first.offset % first.log_interval:
            return f"its first iteration is {message.offset}, rank {first.rank}'s is {first.offset}"
        devices = {device.key for device in message.devices if message.rank not in self.members.get(device.key, ())}
        if self._num_devices.get(message.rank, 0) + len(devices) > MOST_DEVICES:
            return f"it has told of more than {MOST_DEVICES} devices"
        known = state.ranks.get(message.rank)
        heard_s = self._heard_s.get(message.rank)
        if known and known.agent != message.agent and not known.bye and heard_s is not None:
            return f"rank {message.rank} has an agent already" if now_s - heard_s < SILENT_AFTER_S else ""
        return ""

    def admit(self, message: Hello, now_s: float) -> bool:
        """Take an introduction that nothing speaks against; say whether the agent is new."""
        state = self._ledger
        state.job = state.job or message.job
        state.world_size = state.world_size or message.world_size
        self._first_hello_s = now_s if self._first_hello_s is None else self._first_hello_s
        known = state.ranks.get(message.rank)
        is_new = known is None or known.agent != message.agent
        if is_new:
            if known is not None:
                state.spent.add(known)
            state.ranks[message.rank] = RankState(message.agent, last_window=known.last_window if known else 0)
        self.hellos[message.rank] = message
        for device in message.devices:
            old = self.devices.get(device.key)
            # On a host only one rank reads the power sensor, and only its agent knows that there is one.
            if old is None or old.energy_method is None or device.energy_method is not None:
                self.devices[device.key] = device
            members = self.members.setdefault(device.key, set())
            if message.rank not in members:
                members.add(message.rank)
                self._num_devices[message.rank] = self._num_devices.get(message.rank, 0) + 1
        self._blind.discard(message.rank)
        if all(device.only_power for device in message.devices):
            self._blind.add(message.rank)
        self._forget()
        return is_new

    def _forget(self) -> None:
        self.memory.clear()
        self._expected = None

    def rank_of(self, rank: int, agent: str) -> RankState | None:
        """Return the state of a rank, if this is its agent."""
        known = self._ledger.ranks.get(rank)
        return known if known is not None and known.agent == agent else None

    def hear(self, rank: int, now_s: float) -> bool:
        """Note a sign of life; say whether the rank had been silent."""
        self._heard_s[rank] = now_s
        was_silent = rank in self._silent
        self._silent.discard(rank)
        return was_silent

    @property
    def silent(self) -> Collection[int]:
        """Ranks of whom nothing has been heard for long."""
        return self._silent

    @property
    def heard_s(self) -> Mapping[int, float]:
        """When each rank was last heard."""
        return self._heard_s

    def leave(self, rank: RankState, status: str, now_s: float) -> bool:
        """Take a farewell; say whether it is the rank's first."""
        self._first_bye_s = now_s if self._first_bye_s is None else self._first_bye_s
        if rank.bye:
            return False
        rank.bye = status or "killed"
        self._left += 1
        return True

    def fall_silent(self, now_s: float) -> dict[int, float]:
        """Return the ranks that have just been silent for too long, and for how many seconds."""
        fallen = {
            rank: now_s - heard_s
            for rank, heard_s in self._heard_s.items()
            if now_s - heard_s > SILENT_AFTER_S and rank not in self._silent and not self._ledger.ranks[rank].bye
        }
        self._silent |= set(fallen)
        return fallen

    def give_up(self, rank: int) -> None:
        """Take a rank as silent at once: its agent is known to be gone."""
        self._silent.add(rank)

    # --- who is waited for ---

    def awaited(self, before_s: float) -> list[int]:
        """Return the ranks that have come, are not away, and of whom nothing was heard since then."""
        away = self._silent | self._gone
        return [rank for rank, heard_s in self._heard_s.items() if heard_s < before_s and rank not in away]

    @property
    def num_left(self) -> int:
        """How many ranks have left."""
        return self._left

    @property
    def num_away(self) -> int:
        """How many ranks have left or fallen silent."""
        return len(self._silent) + self._left

    def waited_for(self, now_s: float) -> set[int]:
        """Return the ranks that a window waits for, those that have left included."""
        come = set(self._heard_s) - self._silent
        if not self._waits_for_absent(now_s):
            return come
        return come | (set(range(self._ledger.world_size)) - set(self._heard_s))

    def is_behind(self, window: int, now_s: float) -> bool:
        """Whether a window waits for a rank that has not passed it."""
        # Asked for each of ten thousand reports: one that is behind answers for all, until it is not any more.
        last = self._last_behind
        if last is not None and self._is_waited_for(last, now_s) and self._has_not_passed(last, window):
            return True
        behind = [rank for rank in self.waited_for(now_s) if self._has_not_passed(rank, window)]
        self._last_behind = self._chance.choice(behind) if behind else None
        return bool(behind)

    def _has_not_passed(self, rank: int, window: int) -> bool:
        known = self._ledger.ranks.get(rank)
        return known is None or (known.last_window < window and not known.bye)

    def _is_waited_for(self, rank: int, now_s: float) -> bool:
        return rank not in self._silent and (rank in self._heard_s or self._waits_for_absent(now_s))

    def _waits_for_absent(self, now_s: float) -> bool:
        since_s = now_s - (self._first_hello_s if self._first_hello_s is not None else now_s)
        bye_s = now_s - self._first_bye_s if self._first_bye_s is not None else -1.0
        return since_s <= ABSENT_AFTER_S and bye_s <= ABSENT_AFTER_BYE_S

    @property
    def _gone(self) -> set[int]:
        """The ranks that have left."""
        return {rank for rank, known in self._ledger.ranks.items() if known.bye} if self._left else set()

    def absent(self, reporting: Collection[int]) -> set[int]:
        """Return the ranks of the world that neither report nor have left."""
        if len(reporting) == self._ledger.world_size:
            return set()
        return set(range(self._ledger.world_size)).difference(reporting) - self._gone

    def expected(self, reporting: Collection[int]) -> Expected:
        """Return the devices of a window; one that all its ranks have left is not among them."""
        gone = self._gone.difference(reporting)
        if self._expected is None or self._expected[0] != gone:
            hosts = {hello.host for rank, hello in self.hellos.items() if rank not in gone}
            there = (
                key
                for key, ranks in self.members.items()
                if not gone or not ranks <= gone or self._is_of_a_node(key, hosts)
            )
            self._expected = gone, Expected((key, self.devices[key]) for key in there)
        return self._expected[1]

    def sitting(self, reporting: Collection[int]) -> dict[str, set[int]]:
        """Return the ranks on each device of a window."""
        gone = self._gone.difference(reporting)
        return {key: self.members[key] - gone for key in self.expected(reporting)} if gone else self.members

    def _is_of_a_node(self, key: str, hosts: set[str]) -> bool:
        """Whether a device is a sensor of one of these nodes, which matters though the rank that read it has left."""
        return self.devices[key].only_power and self.hellos[min(self.members[key])].host in hosts

    def blind(self, reporting: Collection[int]) -> set[int]:
        """Return the ranks that have not left and that introduced no device that they compute on."""
        return self._blind - self._gone.difference(reporting)

    def everyone_left(self, now_s: float) -> bool:
        """Whether some have left, and nobody else is waited for."""
        if len(self._heard_s) - len(self._silent) > self._left:
            return False  # which is asked all the time
        left = self._gone
        return bool(left) and not self.waited_for(now_s) - left

    def all_silent(self, now_s: float) -> bool:
        """Whether nobody that has not left has been heard for long."""
        away = self._silent | self._gone
        heard = [heard_s for rank, heard_s in self._heard_s.items() if rank not in away]
        return all(now_s - heard_s > SILENT_AFTER_S for heard_s in heard)

    @property
    def nobody_is_there(self) -> bool:
        """Whether ranks have come, and all of them have left or are silent."""
        return bool(self._heard_s) and len(self._silent | self._gone) >= len(self._heard_s)

    # --- what they said ---

    def disagreement(self, message: Hello) -> str:
        """Return how an introduction contradicts an earlier one about the whole model, or an empty string."""
        total = message.parameters.total
        if message.parameters.is_share or total is None:
            return ""
        if self._whole_model is None or self._whole_model[1] == message.rank:
            self._whole_model = (total, message.rank)
        first, rank = self._whole_model
        if first == total:
            return ""
        return (
            f"ranks {rank} and {message.rank} disagree on the parameters of the whole model"
            f": {first:,} and {total:,}; rank {rank}'s count is used"
        )

    @_remembered
    def parameters(self) -> int | None:
        """Return P of the configured kind: the whole model's, or the sum of all ranks' shares once all have come."""
        kind = self.config.parameters
        if self._whole_model is not None:
            value = getattr(self.hellos[self._whole_model[1]].parameters, kind)
            return int(value) if value is not None else None
        given = [hello.parameters for hello in self.hellos.values()]
        shares = [getattr(one, kind) for one in given if one.is_share]
        if len(shares) != self._ledger.world_size or not shares or None in shares:
            return None
        return sum(shares) or None

    @property
    @_remembered
    def num_gpus(self) -> int:
        """How many GPUs are known."""
        return sum(device.is_gpu for device in self.devices.values())

    @property
    @_remembered
    def peak_flops_per_s(self) -> float | None:
        """Peak of the whole job: that of a device as configured, else from the hardware table if it knows all GPUs."""
        peak = self.config.peak_tflops
        if peak:
            return peak * 1e12 * (self.num_gpus or self._ledger.world_size)
        peaks = [peak_of(device.name) for device in self.devices.values() if device.is_gpu]
        known = [one.flops_per_s for one in peaks if one]
        return sum(known) if known and len(known) == len(peaks) else None

    @property
    @_remembered
    def peak_source(self) -> str:
        """What the peak is that MFU is measured against, and from where; empty where there is none."""
        if self.peak_flops_per_s is None:
            return ""
        if self.config.peak_tflops:
            return f"{self.config.peak_tflops:g} TFLOP/s per device, as configured"
        peaks = {peak_of(device.name) for device in self.devices.values() if device.is_gpu}
        return "; ".join(sorted(one.text for one in peaks if one))

    @property
    @_remembered
    def power_limit_w(self) -> float | None:
        """Power limit of all GPUs together, where each has one, or the first die of its card has that of both."""
        owners: dict[str, float] = {}
        for key, device in self.devices.items():
            if device.is_gpu:
                owner = device.energy_key or key
                owners[owner] = owners.get(owner, 0.0) + (device.power_limit_w or 0.0)
        return sum(owners.values()) if owners and all(owners.values()) else None

    @property
    @_remembered
    def baseline_w(self) -> float | None:
        """Idle power of all devices in scope, where it was measured on each."""
        owners: dict[str, float | None] = {}
        for key in self.scope.keys:
            owners[self.devices[key].energy_key or key] = self.devices[key].baseline_w
        known = [one for one in owners.values() if one is not None]
        return sum(known) if known and len(known) == len(owners) else None

    @property
    @_remembered
    def flops_per_token(self) -> float | None:
        """Model FLOPs of a token, where a rank said so."""
        return next((hello.flops_per_token for hello in self.hellos.values() if hello.flops_per_token), None)

    @property
    @_remembered
    def hardware_flops_per_token(self) -> float | None:
        """FLOPs that the hardware does for a token, recomputation included, where a rank said so."""
        said = (hello.hardware_flops_per_token for hello in self.hellos.values())
        return next((flops for flops in said if flops), None)

    @property
    @_remembered
    def total_iterations(self) -> int | None:
        """How long the job will be, where a rank said so."""
        return next((hello.total_iterations for hello in self.hellos.values() if hello.total_iterations), None)

    @property
    @_remembered
    def style(self) -> str:
        """What an iteration is called in this job."""
        return "Step" if any(h.facts.get("style") == "Step" for h in self.hellos.values()) else "Iteration"

    @property
    @_remembered
    def evaluation_is_in_iterations(self) -> bool:
        """Whether a hook sees iterations from one step to the next, whatever else the loop does between."""
        return any(hello.facts.get("evaluation_in_iterations") for hello in self.hellos.values())

    @property
    @_remembered
    def begins_with_a_step(self) -> bool:
        """Whether the metrics began when an optimizer had stepped, and nothing of that iteration is in them."""
        return any(hello.facts.get("iterations_not_measured") for hello in self.hellos.values())

    @property
    @_remembered
    def is_simulated(self) -> bool:
        """Whether any device is not real."""
        return any(device.simulated for device in self.devices.values())

    @property
    @_remembered
    def measures_energy(self) -> bool:
        """Whether any device has an energy or power sensor."""
        return any(device.energy_method for device in self.devices.values())

    @property
    @_remembered
    def scope(self) -> Scope:
        """Whose energy is the job's, and what it is called; once there are sums of it, it stays."""
        wanted, settled = self.config.power_scope, self._ledger.scope
        return keep(self._nodes(), settled, wanted) if settled else choose(self._nodes(), wanted)

    @property
    def scopes(self) -> list[Scope]:
        """What the scope may still become, from the widest: where nobody asked for one, whatever every node has."""
        if self._ledger.scope or self.config.power_scope != AUTO:
            return [self.scope]
        return scopes(self._nodes()) or [self.scope]

    def settle(self, scope: Scope) -> None:
        """Sum up the energy of this scope from now on, whatever sensors may come."""
        if scope.label and not self._ledger.scope:
            self._ledger.scope = scope.choice
            self._forget()

    def _nodes(self) -> list[Node]:
        nodes: dict[str, list[Device]] = {hello.host: [] for hello in self.hellos.values()}
        for key, ranks in self.members.items():
            nodes[self.hellos[min(ranks)].host].append(self.devices[key])
        return list(nodes.values())

    @property
    @_remembered
    def energy_method(self) -> str | None:
        """How the energy is measured."""
        methods = {self.devices[key].energy_method for key in self.scope.keys}
        return "+".join(method for method in METHODS if method in methods) or None

    @property
    @_remembered
    def not_measured(self) -> tuple[str, ...]:
        """A sentence per quantity that some device cannot give, in whatever order its ranks joined."""
        sentences = {
            one_line(text)
            for hello in self.hellos.values()
            for device in hello.devices
            # An agent that reads no energy of a device says nothing about one that another agent reads.
            if device.energy_method or not self.devices[device.key].energy_method
            for text in device.not_measured
        }
        return tuple(sorted(sentences | ({self.scope.complaint} if self.scope.complaint else set())))

    @property
    @_remembered
    def open_shares(self) -> tuple[str, ...]:
        """One sentence where it is unknown of what share of its ticks an energy counter tells; else nothing."""
        models = {device.name or "GPUs without a name" for device in self.devices.values() if is_share_open(device)}
        if not models:
            return ()
        text = (
            f"share of each tick that the energy counter measures ({', '.join(sorted(models))}): the timing errors of "
            "windows allow for each; `effllm profile` measures it, once per model and driver"
        )
        return (one_line(text),)


class Peak(NamedTuple):
    """What a device can do at most, and from where that is known."""

    flops_per_s: float
    text: str


@cache  # asked for every window and GPU
def peak_of(name: str) -> Peak | None:
    """Return a GPU's dense peak in BF16, or in FP16 where it is older than that, by the hardware table."""
    row = hardware.find(name)
    for precision in ("bf16", "fp16"):
        if row and (peak := hardware.peak_flops_per_s(name, precision)):
            doubt = ", unconfirmed" if row.source.evidence == "unconfirmed" else ""
            text = f"{peak / 1e12:g} TFLOP/s per GPU, dense {precision.upper()}, {row.names[0]} in the hardware table"
            return Peak(peak, text + doubt)
    return None
