"""TRL's trainers with generation during training: GRPO, RLOO, distillation.

These trainers are subclasses of Trainer, so `effllm.hooks.transformers` measures their steps.  In addition, a step
generates from prompts and makes its own batch; the generation is inference and not part of AL.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence, Sized
from itertools import islice
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._wrap import Call, Guard, around
from effllm.hooks.transformers import running
from effllm.instruments.grpo import tracker_of
from effllm.trainer.collector import get_metrics_collector

_REWARDS_GUARD = Guard("the reward of groups in TRL")
_GUARD = Guard("the generation of TRL")

#: Name in a batch of these trainers -> usual name.
_NAMES = {
    "prompt_ids": "prompt_input_ids",
    "prompt_mask": "prompt_attention_mask",
    "completion_ids": "completion_input_ids",
    "completion_mask": "completion_attention_mask",
}


def attach(module: ModuleType) -> None:
    trainers = [own for own in vars(module).values() if inspect.isclass(own) and "_generate_single_turn" in vars(own)]
    if not trainers:
        raise Unknown("a trainer with _generate_single_turn")
    for trainer in trainers:
        around(trainer, "_generate_single_turn", _GUARD, before=_generates, after=_generated, failed=_generation_failed)
        around(trainer, "_generate", _GUARD, before=_rolls_out, after=_rolled_out, failed=_generation_failed)
        around(trainer, "_prepare_inputs", _GUARD, after=_prepared)
        # TRL gathers the rewards of all ranks, and keeps them and its step metrics as Python numbers for its own logs.
        # Only these numbers are added to the process's `GRPOMetricsTracker`, so there is no further synchronisation.
        if "_generate_and_score_completions" in trainer.__dict__:
            around(trainer, "_generate_and_score_completions", _REWARDS_GUARD, after=_scored)
            around(trainer, "log", _REWARDS_GUARD, before=_logs)


def _generates(call: Call) -> Any:
    training, recorder = running(), get_metrics_collector().recorder
    if training is None or recorder is None or training.trainer is not call.args[0]:
        return None
    recorder.generations.start(is_phase=True)
    return recorder


def _generated(recorder: Any, call: Call, result: Any) -> None:
    if recorder is None:
        return
    prompts = call.get("prompt_ids")
    if prompts is None:  # up to TRL 0.24, the input is text, and the result begins with the tokens of the prompts
        prompts, completions = result[:2]
    else:
        completions = result[0] if isinstance(result, tuple) else result
    recorder.generations.end(_length(completions), _length(prompts))


def _generation_failed(recorder: Any) -> None:
    if recorder is not None:
        recorder.generations.end(0)


def _rolls_out(call: Call) -> Any:
    # A user's own rollout replaces _generate_single_turn; the time of tools in the rollout counts as generation.
    return _generates(call) if getattr(call.args[0], "rollout_func", None) is not None else None


def _rolled_out(recorder: Any, call: Call, result: Any) -> None:
    if recorder is not None:
        recorder.generations.end(_length(result[1]), _length(result[0]))


def _prepared(_token: Any, call: Call, result: Any) -> None:
    training = running()
    if training is not None and training.trainer is call.args[0] and training.depth and "completion_ids" in result:
        training.see({_NAMES.get(name, name): value for name, value in result.items() if name != "labels"})


def _length(sequences: Any) -> int:
    return sum(len(sequence) for sequence in sequences if isinstance(sequence, Sized))


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
        counts = [
            weight * reward
            for weight, reward in zip(weights or [1.0] * len(rewards), rewards, strict=True)
            if not math.isnan(reward)
        ]
        yield sum(counts) if counts else math.nan


def _mean(values: list[float]) -> float | None:
    measured = [value for value in values if not math.isnan(value)]
    return math.fsum(measured) / len(measured) if measured else None
