"""The settings that determine the memory of DeepSpeed's engine, for the fact ``framework_plan``."""

from __future__ import annotations

from typing import Any

from effllm.hooks._plan import NoPlan, is_language_model, layer_settings, optimizer_name, stated_plan, weights_of
from effllm.hooks._wrap import Guard

_GUARD = Guard("the plan of DeepSpeed's memory")


def plan_of_engine(engine: Any) -> str:
    """Return the settings of an engine; empty if they cannot describe it.

    Of a model that is no language model of transformers, the checkpointing is left out.
    """
    return stated_plan(_GUARD, _settings, engine)


def _settings(engine: Any) -> dict[str, Any]:
    return {
        **weights_of(engine.module, None),
        "optimizer": optimizer_name(engine.optimizer),
        **(layer_settings(engine.module) if is_language_model(engine.module) else {}),
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        **engine_settings(engine),
    }


def engine_settings(engine: Any) -> dict[str, Any]:
    """Return precision, ranks and stage of an engine.

    Raises:
        NoPlan: parts of the memory are on the host, or ranks divide the model or a sequence.
    """
    offloads = (engine.zero_offload_optimizer(), engine.zero_offload_param())
    if any(getattr(one.device, "value", "") != "none" for one in offloads if one is not None):
        raise NoPlan("offloading")
    is_divided = engine.mp_world_size > 1 or (getattr(engine, "sequence_parallel_size", 1) or 1) > 1
    if is_divided or getattr(engine, "pipeline_parallelism", False) or getattr(engine, "has_moe_layers", False):
        raise NoPlan("ranks divide the model")
    stage, ranks = engine.zero_optimization_stage(), engine.dp_world_size
    return {"precision": _precision(engine, stage), "zero": stage or None, "dp": ranks if ranks > 1 else None}


def _precision(engine: Any, stage: int) -> str | None:
    """Return the precision; ``None`` if the types of gradients or optimizer are others than the usual ones."""
    if getattr(engine, "torch_autocast_enabled", lambda: False)():
        return None
    if not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return "fp32"
    short, of_gradients = engine.get_data_types()
    others = ("fp16_master_weights_and_gradients", "bf16_master_weights_and_gradients", "bf16_optimizer_states")
    is_usual = stage > 0 and short == of_gradients
    return "bf16-zero" if is_usual and not any(getattr(engine, name, bool)() for name in others) else None
