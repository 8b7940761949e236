"""The facts of a run, which run.json contains in addition to the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from effllm.records.orders import Orders
from effllm.records.wire import Hello
from effllm.store.provenance import Git, gather

#: Fields of HELLO that are facts of the run with the same names.
OF_LOOP = ("style", "evaluation_in_iterations", "iterations_not_measured")
MAX_FACTS = 1000  # limit of the facts of a run; rank 0 sends about twenty
MAX_FACTS_BYTES = 256 * 1024  # limit of the size of the facts sent by ranks


class GitFacts(NamedTuple):
    """Git's facts about the user's code."""

    facts: Mapping[str, Any]


class RunFacts:
    """Facts from the start of the aggregator, from ranks, and from git."""

    def __init__(self, orders: Orders) -> None:
        self.values: dict[str, Any] = {
            **gather(),
            **orders.facts,
            "config": msgspec.to_builtins(orders.config),
            "job": orders.job,
        }
        self._git = Git(Path.cwd())
        self._has_git = self._is_changed = False
        self.has_new_rank = False  # whether a rank has joined since the last `take`
        self._num_bytes = 0  # size of the facts sent by ranks
        self._taken_s = float("-inf")

    def ask_git(self) -> GitFacts:
        """Return the commit of the user's code; must run in a separate thread, because git may take seconds."""
        return GitFacts(self._git.facts())

    def add_git(self, answer: GitFacts) -> None:
        """Add git's facts, without a change of existing facts."""
        self.values, self._is_changed, self._has_git = {**answer.facts, **self.values}, True, True

    def stop_git(self) -> None:
        self._git.stop()
        if not self._has_git:
            self.values["git_dirty"], self._is_changed = "unknown", True

    def learn(self, hello: Hello) -> bool:
        """Add the facts in a rank's HELLO; return ``True`` only for the last missing rank of the job."""
        ranks = self.values.setdefault("ranks", {})
        is_new = str(hello.rank) not in ranks
        entry = {
            "host": hello.host,
            "role": hello.role,
            "devices": [msgspec.to_builtins(device) for device in hello.devices],
        }
        is_changed = ranks.get(str(hello.rank)) != entry
        facts = hello.facts | {name: value for name in OF_LOOP if (value := getattr(hello, name))}
        new = [name for name in facts if name not in self.values] if self._num_bytes < MAX_FACTS_BYTES else []
        for name in new[: max(MAX_FACTS - len(self.values), 0)]:
            self._num_bytes += len(name) + len(msgspec.json.encode(facts[name]))
            if self._num_bytes <= MAX_FACTS_BYTES:
                self.values[name], is_changed = facts[name], True
        ranks[str(hello.rank)] = entry
        self.values["world_size"] = hello.world_size
        self.has_new_rank = self.has_new_rank or is_new
        self._is_changed = self._is_changed or is_changed
        return is_new and len(ranks) == hello.world_size

    def take(self, now_s: float, every_s: float, parameters: Callable[[], int | None]) -> dict[str, Any] | None:
        """Return the facts if they have changed, at most once in ``every_s`` seconds, else ``None``."""
        if not self._is_changed or now_s - self._taken_s < every_s:
            return None
        self._is_changed, self.has_new_rank, self._taken_s = False, False, now_s
        return {**self.values, "ranks": dict(self.values.get("ranks", {})), "parameters": parameters()}
