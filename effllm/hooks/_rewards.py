"""Rewards and step metrics of TRL's trainers with groups of completions: GRPO and RLOO.

TRL gathers the rewards of all ranks, and keeps them and its step metrics as Python numbers for its own logs.  Only
these numbers are read, so there is no further synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from effllm.hooks._wrap import Call, Guard, around
from effllm.instruments.grpo import tracker_of

_GUARD = Guard("the reward of groups in TRL")


def attach_rewards(trainer: Any) -> None:
    """Hook a class of trainers: their rewards and logs are added to the process's `GRPOMetricsTracker`."""
    if "_generate_and_score_completions" in trainer.__dict__:
        around(trainer, "_generate_and_score_completions", _GUARD, after=_scored)
        around(trainer, "log", _GUARD, before=_logs)


def _scored(_token: None, call: Call, _result: Any) -> None:
    trainer = call.args[0]
    if not _is_fed(trainer):
        return
    tracker, size = tracker_of(trainer), trainer.num_generations
    count = len(call.get("inputs")) * trainer.accelerator.num_processes
    by_function = {name: _newest(rewards, count) for name, rewards in trainer._logs["rewards"].items()}
    totals = list(_totals(list(by_function.values()), trainer.args.reward_weights))
    means = {name: _mean(rewards) for name, rewards in by_function.items()}
    # The completions are for the next step; TRL logs a step after its end.
    tracker.update_grpo_step(trainer.state.global_step + 1, mean_reward=_mean(totals), reward_components=means)
    for at in range(0, len(totals) - size + 1, size):
        tracker.update_group_rewards(totals[at : at + size])


def _logs(call: Call) -> None:
    trainer = call.args[0]
    if not _is_fed(trainer):
        return
    tracker, step = tracker_of(trainer), trainer.state.global_step
    tracker.update_grpo_step(step, policy_loss=call.get("logs").get("loss"))
    for value in trainer._metrics["train"].get("kl", ()):  # one value for each micro-batch since TRL's last log
        tracker.update_grpo_step(step, kl_divergence=value)


def _is_fed(trainer: Any) -> bool:
    """Whether these are values of training, in the first process; in all processes TRL has the same values."""
    return bool(trainer.model.training and trainer.accelerator.is_main_process)


def _newest(values: Sequence[float], count: int) -> list[float]:
    return list(islice(values, max(len(values) - count, 0), None))


def _totals(columns: list[list[float]], weights: Sequence[float] | None) -> Iterator[float]:
    """Yield the reward of each completion as TRL computes it: functions whose reward is NaN are left out."""
    for rewards in zip(*columns, strict=True):
        known = [
            weight * reward
            for weight, reward in zip(weights or [1.0] * len(rewards), rewards, strict=True)
            if not math.isnan(reward)
        ]
        yield sum(known) if known else math.nan


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None
