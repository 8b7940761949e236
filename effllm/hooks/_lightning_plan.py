"""The settings that determine the memory of a Lightning Trainer, for the fact ``framework_plan``."""

from __future__ import annotations

from typing import Any

from effllm.hooks._parameters import size_of
from effllm.hooks._plan import (
    MAIN_SHARE,
    NoPlan,
    is_language_model,
    layer_settings,
    optimizer_name,
    stated_plan,
    weights_of,
)
from effllm.hooks._wrap import Guard

#: Precision of a Trainer -> type of autocast.
_AUTOCAST = {"32-true": None, "bf16-true": None, "16-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}
_ALONE, _REPLICATED = "SingleDeviceStrategy", "DDPStrategy"

_GUARD = Guard("the plan of Lightning's memory")


def plan_of_module(trainer: Any, module: Any) -> str:
    """Return the settings of a training, known from its first batch on; empty if they cannot describe it.

    If the module contains no language model of transformers, the checkpointing is left out.
    """
    return stated_plan(_GUARD, _settings, trainer, module)


def _settings(trainer: Any, module: Any) -> dict[str, Any]:
    strategy, ranks = type(trainer.strategy).__name__, trainer.world_size
    is_compiled = any(type(one).__name__ == "OptimizedModule" for one in module.modules())
    if strategy not in (_ALONE, _REPLICATED) or is_compiled or getattr(module, "_compiler_ctx", None) is not None:
        raise NoPlan("another strategy or a compiled model")
    if len(trainer.optimizers) != 1 or str(trainer.precision) not in _AUTOCAST:
        raise NoPlan("several optimizers, or another precision")
    size = getattr(trainer.train_dataloader, "batch_size", None)
    model = next((one for one in module.modules() if is_language_model(one)), module)
    if _elements(model) < MAIN_SHARE * _elements(module):
        raise NoPlan("another model")
    return {
        **weights_of(model, _AUTOCAST[str(trainer.precision)]),
        "optimizer": optimizer_name(trainer.optimizers[0]),
        **(layer_settings(model) if is_language_model(model) else {}),
        "micro_batch": size if type(size) is int else None,
        "accumulation": trainer.accumulate_grad_batches,
        "dp": ranks if ranks > 1 else None,
    }


def _elements(module: Any) -> int:
    return sum(size_of(one) for one in module.parameters())
