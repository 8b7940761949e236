"""What an aggregator is started with; apart from it, because an agent that starts one needs nothing else of it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Orders(Struct, frozen=True):
    """What an aggregator is started with."""

    config: dict[str, Any]
    job: str
    endpoint: str
    folder: str  # the run folder, absolute; empty for none
    listen_descriptor: int = -1
    stdout_descriptor: int = 1
    trainer_descriptor: int = -1  # pidfd of rank 0's trainer
    facts: dict[str, Any] = {}
    run: str = ""  # what all attempts of the job have in common, by effllm/store/run_lock.py
    secured: bool = False  # with keys from the user's secret ...
    salt: str = ""  # ... and this: the job's id where its agents know it
    by_agent: bool = False  # it was started by rank 0's agent, its parent
