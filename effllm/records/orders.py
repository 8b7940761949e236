"""The arguments of an aggregator process, in a module that an agent can import without the aggregator."""

from __future__ import annotations

from msgspec import Struct

from effllm.config.settings import Config
from effllm.records.facts import Fact


class Orders(Struct, frozen=True):
    """The arguments of an aggregator process."""

    config: Config
    job: str
    endpoint: str
    folder: str  # absolute path of the run folder; empty for none
    listen_descriptor: int = -1
    stdout_descriptor: int = 1
    trainer_descriptor: int = -1  # pidfd of rank 0's trainer
    facts: dict[str, Fact] = {}
    restart_id: str = ""  # shared by all attempts of the job, see effllm/store/run_lock.py
    secured: bool = False  # whether connections use keys derived from the user's secret and the salt
    salt: str = ""  # the salt of the keys: the job's id, if the agents have it
    by_agent: bool = False  # whether rank 0's agent started the aggregator and is its parent
