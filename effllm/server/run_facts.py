"""The facts of a run, which run.json contains in addition to the settings."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from effllm.records.identity import MAX_LETTERS, Identity, Submission, clean_submission, read_tags, with_facts
from effllm.records.job import Summary
from effllm.records.orders import Orders
from effllm.records.plain_text import one_line, without_user
from effllm.records.wire import Hello
from effllm.store.provenance import Git, host_facts
from effllm.store.run_folder import identity_of
from effllm.views.text.closing import current_folder, how_to_open
from effllm.views.text.numbers import count_text

#: Fields of HELLO that are facts of the run with the same names.
FACTS_OF_HELLO = ("style", "evaluation_in_iterations", "iterations_not_measured")
MAX_FACTS = 1000  # limit of the facts of a run; rank 0 sends about twenty
MAX_FACTS_BYTES = 256 * 1024  # limit of the size of the facts sent by ranks


class SlowFacts(NamedTuple):
    """Facts from a separate thread: git's facts about the user's code, or the user of this process."""

    facts: Mapping[str, Any]


class RunFacts:
    """Facts from the start of the aggregator, from ranks, and from git."""

    def __init__(self, orders: Orders) -> None:
        config = msgspec.to_builtins(orders.config)
        self.values: dict[str, Any] = {
            **host_facts(),
            **orders.facts,
            # URLs of sinks may contain users and passwords.
            "config": {**config, "sinks": [without_user(sink) for sink in config["sinks"]]},
            "job": orders.job,
        }
        self._tags = read_tags(orders.config.tags)
        self._submission: Submission | None = None
        self._run_id = Path(orders.folder).name or orders.job  # without a run folder
        self.identity = Identity(run_id=self._run_id)
        command = orders.facts.get("command")
        self._git = Git(Path.cwd(), command[0] if isinstance(command, list) and command else "")
        self._is_in_job_folder = orders.by_agent  # the folder of `effllm serve` is not that of the training
        self._has_slow_facts = self._is_changed = False  # changed: since the last `take_facts`
        self.has_new_rank = False  # whether a rank has joined since the last `take_facts`
        self._num_bytes = 0  # size of the facts sent by ranks
        self._taken_s = float("-inf")  # monotonic time of the last result of `take_facts`

    def begin(self, folder: Path | None) -> dict[str, Any]:
        """Continue the identity of the earlier attempts in the run folder; return the content of run.json."""
        earlier = identity_of(folder) if folder is not None else Identity()
        run_id = folder.name if folder is not None else self._run_id
        self.identity = replace(earlier, run_id=run_id, ended_time_s=None, tags=self._tags or earlier.tags)
        self._update_identity()
        return {**self.values, **asdict(self.identity)}

    def add_times(self, started_time_s: float, ended_time_s: float | None = None) -> None:
        times = {"started_time_s": started_time_s, "ended_time_s": ended_time_s or self.identity.ended_time_s}
        if any(getattr(self.identity, name) != time_s for name, time_s in times.items()):
            self.identity, self._is_changed = replace(self.identity, **times), True

    def with_identity(self, summary: Summary) -> Summary:
        """Return the summary with the identity of the run, and the source of its tokens, but its own times."""
        fields = {name: value for name, value in asdict(self.identity).items() if not name.endswith("_time_s")}
        return replace(summary, **fields, token_source=one_line(str(self.values.get("token_source", "")))[:MAX_LETTERS])

    def _update_identity(self) -> None:
        self.identity = with_facts(self.identity, self._submission, self.values, self.values.get("ranks", {}))

    def read_slow_facts(self, put: Callable[[SlowFacts], None]) -> None:
        """Pass the commit of the user's code, then the user of this process, to ``put``.

        It must run in a separate thread, because git may take seconds, and a directory service may hang.
        """
        put(SlowFacts(self._git.facts() if self._is_in_job_folder else {}))
        with suppress(KeyError, OSError):  # the user has no name, as in some containers
            put(SlowFacts({"user": pwd.getpwuid(os.getuid()).pw_name}))

    def add_slow_facts(self, slow: SlowFacts) -> None:
        """Add facts without a change of existing facts; git's facts are the first."""
        self.values, self._is_changed, self._has_slow_facts = {**slow.facts, **self.values}, True, True

    def stop_git(self) -> None:
        """Stop git; if its facts have not arrived, `git_dirty` is unknown."""
        self._git.stop()
        if not self._has_slow_facts:
            self.values["git_dirty"], self._is_changed = "unknown", True

    def add_hello(self, hello: Hello) -> bool:
        """Add the facts in a rank's HELLO; return ``True`` only for the last missing rank of the job."""
        ranks = self.values.setdefault("ranks", {})
        is_new = str(hello.rank) not in ranks
        entry = {
            "host": hello.host,
            "role": hello.role,
            "devices": [msgspec.to_builtins(device) for device in hello.devices],
        }
        is_changed = ranks.get(str(hello.rank)) != entry
        if hello.rank == 0 and hello.submission is not None:
            earlier, self._submission = self._submission, clean_submission(hello.submission, self._tags)
            is_changed = is_changed or self._submission != earlier
        facts = hello.facts | {name: value for name in FACTS_OF_HELLO if (value := getattr(hello, name))}
        new_names = [name for name in facts if name not in self.values] if self._num_bytes < MAX_FACTS_BYTES else []
        for name in new_names[: max(MAX_FACTS - len(self.values), 0)]:
            self._num_bytes += len(name) + len(msgspec.json.encode(facts[name]))
            if self._num_bytes <= MAX_FACTS_BYTES:
                self.values[name], is_changed = facts[name], True
        ranks[str(hello.rank)] = entry
        self.values["world_size"] = hello.world_size
        self.has_new_rank = self.has_new_rank or is_new
        self._is_changed = self._is_changed or is_changed
        return is_new and len(ranks) == hello.world_size

    def started_text(self, folder: Path | None) -> str:
        """Return the text of the event started: ranks and GPUs of the job, and the command that shows the run."""
        ranks = self.values.get("ranks", {})
        gpus = {gpu["key"]: gpu for rank in ranks.values() for gpu in rank["devices"] if gpu["is_gpu"]}
        models = ", ".join(sorted({str(gpu["name"]) for gpu in gpus.values()})[:2])
        is_simulated = any(gpu["simulated"] for gpu in gpus.values())
        noun, names = ("simulated GPU", "") if is_simulated else ("GPU", f" ({models})")
        gpus_text = f"on {count_text(len(gpus), noun)}{names}" if gpus else "without a GPU"
        text = one_line(f"{count_text(len(ranks), 'rank')} {gpus_text}")
        command = next(how_to_open(folder, None, current_folder(), "top"), "") if folder is not None else ""
        return f"measuring {text}" + (f"; to look: {command}" if command else "")

    def take_facts(self, now_s: float, every_s: float, parameters: Callable[[], int | None]) -> dict[str, Any] | None:
        """Return the facts if they have changed, at most once in ``every_s`` seconds, else ``None``."""
        if not self._is_changed or now_s - self._taken_s < every_s:
            return None
        self._is_changed, self.has_new_rank, self._taken_s = False, False, now_s
        self._update_identity()
        ranks = dict(self.values.get("ranks", {}))
        return {**self.values, "ranks": ranks, "parameters": parameters(), **asdict(self.identity)}
