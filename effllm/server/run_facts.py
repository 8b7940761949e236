"""The facts of a run: what run.json holds beside the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from effllm.records.orders import Orders
from effllm.records.wire import Hello
from effllm.store.provenance import Git, gather

#: The fields of HELLO that are facts of the run by the same names.
OF_LOOP = ("style", "evaluation_in_iterations", "iterations_not_measured")
MAX_FACTS = 1000  # of a run; rank 0 sends about twenty
MAX_FACTS_BYTES = 256 * 1024  # of what ranks send as facts of the run


class GitFacts(NamedTuple):
    """What git answered about the user's code."""

    facts: Mapping[str, Any]


class RunFacts:
    """Facts that are known at the start, those that ranks send, and what git answers."""

    def __init__(self, orders: Orders) -> None:
        self.values: dict[str, Any] = {
            **gather(),
            **orders.facts,
            "config": msgspec.to_builtins(orders.config),
            "job": orders.job,
        }
        self._git = Git(Path.cwd())
        self._has_git = self._is_changed = False
        self.has_new_rank = False  # since `take`
        self._num_bytes = 0  # of those that ranks have sent
        self._taken_s = float("-inf")

    def ask_git(self) -> GitFacts:
        """Return the commit of the user's code; git may take seconds, so this runs in a thread of its own."""
        return GitFacts(self._git.facts())

    def add_git(self, answer: GitFacts) -> None:
        """Add what git answered; what is known already stays."""
        self.values, self._is_changed, self._has_git = {**answer.facts, **self.values}, True, True

    def stop_git(self) -> None:
        """Wait for git no longer."""
        self._git.stop()
        if not self._has_git:
            self.values["git_dirty"], self._is_changed = "unknown", True

    def learn(self, hello: Hello) -> bool:
        """Add what a rank sends with its HELLO; return whether all ranks of the job are known by it, the first time."""
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
        """Return the facts if they have changed and were last returned `every_s` seconds ago, else ``None``."""
        if not self._is_changed or now_s - self._taken_s < every_s:
            return None
        self._is_changed, self.has_new_rank, self._taken_s = False, False, now_s
        return {**self.values, "ranks": dict(self.values.get("ranks", {})), "parameters": parameters()}
