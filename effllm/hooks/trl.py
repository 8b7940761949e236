"""TRL's trainers with generation during training: GRPO, RLOO, distillation.

These trainers are subclasses of Trainer, so `effllm.hooks.transformers` measures their steps.  In addition, a step
generates from prompts and makes its own batch; the generation is inference and not part of AL.
"""

from __future__ import annotations

import inspect
from collections.abc import Sized
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._rewards import attach_rewards
from effllm.hooks._wrap import Call, Guard, around
from effllm.hooks.transformers import running
from effllm.trainer.collector import get_metrics_collector

_GUARD = Guard("the generation of TRL")

#: Name in a batch of these trainers -> usual name.
_NAMES = {
    "prompt_ids": "prompt_input_ids",
    "prompt_mask": "prompt_attention_mask",
    "completion_ids": "completion_input_ids",
    "completion_mask": "completion_attention_mask",
}


def attach(module: ModuleType) -> None:
    trainers = [
        one for one in vars(module).values() if inspect.isclass(one) and "_generate_single_turn" in one.__dict__
    ]
    if not trainers:
        raise Unknown("a trainer with _generate_single_turn")
    for trainer in trainers:
        around(trainer, "_generate_single_turn", _GUARD, before=_generates, after=_generated, failed=_generation_failed)
        around(trainer, "_generate", _GUARD, before=_rolls_out, after=_rolled_out, failed=_generation_failed)
        around(trainer, "_prepare_inputs", _GUARD, after=_prepared)
        attach_rewards(trainer)


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
    return sum(len(one) for one in sequences if isinstance(one, Sized))
