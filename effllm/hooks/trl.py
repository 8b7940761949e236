"""TRL's trainers with generation during training: GRPO, RLOO, distillation.

These trainers are subclasses of Trainer, so `effllm.hooks.transformers` measures their steps.  In addition, a step
generates from prompts and makes its own batch; the generation is inference and not part of AL.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence, Sized
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._wrap import Call, Guard, around
from effllm.hooks.transformers import measured_training
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
    trainers = [obj for obj in vars(module).values() if inspect.isclass(obj) and "_generate_single_turn" in vars(obj)]
    if not trainers:
        raise Unknown("a trainer with _generate_single_turn")
    for trainer in trainers:
        begins, ends, fails = _generation_begins, _generation_ended, _generation_failed
        around(trainer, "_generate_single_turn", _GUARD, before=begins, after=ends, failed=fails)
        around(trainer, "_generate", _GUARD, before=_rollout_begins, after=_rollout_ended, failed=_generation_failed)
        around(trainer, "_prepare_inputs", _GUARD, after=_count_prepared_batch)
        # TRL gathers the rewards of all ranks, and keeps them and its step metrics as Python numbers for its own logs.
        # Only these numbers are added to the process's `GRPOMetricsTracker`, so there is no further synchronisation.
        if "_generate_and_score_completions" in trainer.__dict__:
            around(trainer, "_generate_and_score_completions", _REWARDS_GUARD, after=_track_rewards)
            around(trainer, "log", _REWARDS_GUARD, before=_track_log)


def _generation_begins(call: Call) -> Any:
    training, recorder = measured_training(), get_metrics_collector().recorder
    if training is None or recorder is None or training.trainer is not call.args[0]:
        return None
    recorder.generations.begin(is_phase=True)
    return recorder


def _generation_ended(recorder: Any, call: Call, result: Any) -> None:
    if recorder is None:
        return
    prompts = call.get("prompt_ids")
    if prompts is None:  # up to TRL 0.24, the input is text, and the result begins with the tokens of the prompts
        prompts, completions = result[:2]
    else:
        completions = result[0] if isinstance(result, tuple) else result
    recorder.generations.end(_num_tokens(completions), _num_tokens(prompts))


def _generation_failed(recorder: Any) -> None:
    if recorder is not None:
        recorder.generations.end(0)


def _rollout_begins(call: Call) -> Any:
    # A user's own rollout replaces _generate_single_turn; the time of tools in the rollout counts as generation.
    return _generation_begins(call) if getattr(call.args[0], "rollout_func", None) is not None else None


def _rollout_ended(recorder: Any, call: Call, result: Any) -> None:
    if recorder is not None:
        recorder.generations.end(_num_tokens(result[1]), _num_tokens(result[0]))


def _count_prepared_batch(_token: Any, call: Call, result: Any) -> None:
    training = measured_training()
    if training is not None and training.trainer is call.args[0] and training.depth and "completion_ids" in result:
        batch = {_NAMES.get(name, name): value for name, value in result.items() if name != "labels"}
        training.count_micro_batch(batch)


def _num_tokens(sequences: Any) -> int:
    return sum(len(sequence) for sequence in sequences if isinstance(sequence, Sized))


def _track_rewards(_token: None, call: Call, _result: Any) -> None:
    trainer = call.args[0]
    if not _is_tracked(trainer):
        return
    tracker, group_size = tracker_of(trainer), trainer.num_generations
    num_completions = len(call.get("inputs")) * trainer.accelerator.num_processes
    by_function = {name: list(rewards)[-num_completions:] for name, rewards in trainer._logs["rewards"].items()}
    totals = list(_total_rewards(list(by_function.values()), trainer.args.reward_weights))
    means = {name: _mean(rewards) for name, rewards in by_function.items()}
    # The completions are for the next step; TRL logs a step after its end.
    tracker.update_grpo_step(trainer.state.global_step + 1, mean_reward=_mean(totals), reward_components=means)
    for start in range(0, len(totals) - group_size + 1, group_size):
        tracker.update_group_rewards(totals[start : start + group_size])


def _track_log(call: Call) -> None:
    trainer = call.args[0]
    if not _is_tracked(trainer):
        return
    tracker, step = tracker_of(trainer), trainer.state.global_step
    tracker.update_grpo_step(step, policy_loss=call.get("logs").get("loss"))
    for value in trainer._metrics["train"].get("kl", ()):  # one value for each micro-batch since TRL's last log
        tracker.update_grpo_step(step, kl_divergence=value)


def _is_tracked(trainer: Any) -> bool:
    """Whether these are values of training, in the first process; in all processes TRL has the same values."""
    return bool(trainer.model.training and trainer.accelerator.is_main_process)


def _total_rewards(by_function: list[list[float]], weights: Sequence[float] | None) -> Iterator[float]:
    """Yield the reward of each completion as TRL computes it: functions whose reward is NaN are left out."""
    for rewards in zip(*by_function, strict=True):
        weighted = [
            weight * reward
            for weight, reward in zip(weights or [1.0] * len(rewards), rewards, strict=True)
            if not math.isnan(reward)
        ]
        yield sum(weighted) if weighted else math.nan


def _mean(values: list[float]) -> float | None:
    measured = [value for value in values if not math.isnan(value)]
    return math.fsum(measured) / len(measured) if measured else None
