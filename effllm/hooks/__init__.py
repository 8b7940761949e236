"""The hooks of training systems, a file for each system or for similar ones, and the table of hooked modules.

A hook file has a function ``attach(module)``, and similar functions for further modules.  Such a function raises
`Unknown` if the module's version is unknown: then one line is printed, and this system is not measured.  Hooks run in
the training process, so they import only the standard library and the modules of the training.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

from effllm.hooks._imports import when_imported
from effllm.hooks._wrap import explain_at_exit, print_once

#: Module of a framework -> the function that hooks it, in a file of this folder.
TARGETS: dict[str, str] = {
    "megatron.training.training": "megatron_training:attach",
    "megatron_patch.training": "megatron_training:attach",
    "megatron.core.rerun_state_machine": "megatron_training:attach_data",
    "megatron.core.pipeline_parallel.schedules": "megatron_schedules:attach",
    "megatron.core.distributed.finalize_model_grads": "megatron_schedules:attach_gradients",
    "megatron.core.optimizer.optimizer": "megatron_schedules:attach_optimizer",
    "megatron.core.optimizer.layer_wise_optimizer": "megatron_schedules:attach_optimizer",
    "transformers.trainer": "transformers:attach",
    "transformers.integrations.integration_utils": "transformers:attach_reports",
    "trl.trainer.grpo_trainer": "trl:attach",
    "trl.trainer.rloo_trainer": "trl:attach",
    "trl.trainer.distillation_trainer": "trl:attach",
    "transformers.generation.utils": "generate:attach",
    "vllm.entrypoints.llm": "generate:attach_vllm",
    "deepspeed.runtime.engine": "deepspeed:attach",
    "deepspeed.runtime.pipe.engine": "deepspeed:attach_pipeline",
    "lightning.fabric.wrappers": "fabric:attach",
    "lightning.fabric.fabric": "fabric:attach_fabric",
    "lightning_fabric.wrappers": "fabric:attach",
    "lightning_fabric.fabric": "fabric:attach_fabric",
    "accelerate.optimizer": "optimizer:attach_accelerate",
    "torchtitan.components.metrics": "torchtitan:attach",
    "torchtitan.trainer": "torchtitan:attach_trainer",
    "torchtitan.train": "torchtitan:attach_trainer",
    "torchtune.recipe_interfaces": "torchtune:attach",
    "torchtune.utils": "torchtune:attach_batches",
    "wandb.sdk.wandb_run": "trackers:attach",
    "trackio.run": "trackers:attach",
    "mlflow.tracking.fluent": "trackers:attach_mlflow",
    "torch.autograd": "backward:attach",
    "torch.nn.parallel.distributed": "backward:attach_ddp",
    "torch.amp.grad_scaler": "backward:attach_scaler",
    "torch.distributed.fsdp.sharded_grad_scaler": "backward:attach_scaler",
    "torch.optim.optimizer": "optimizer:attach",
    "torch.utils.data.dataloader": "optimizer:attach_loader",
    "torch.cuda.graphs": "optimizer:attach_graphs",
}

#: Modules of `TARGETS` in which effllm's name is registered, so that users can select effllm in a framework's settings.
NAMES = ("transformers.integrations.integration_utils",)

_is_attached = False  # whether `attach_all` was called


class Unknown(Exception):
    """A framework differs from all known versions; the message names the missing part."""


def attach_all() -> None:
    """Hook every module of `TARGETS`, now or when it is imported; a second call has no effect."""
    global _is_attached
    if _is_attached:
        return
    _is_attached = True
    for target in TARGETS:
        when_imported(target, partial(_hook_module, target))


def attach_names() -> None:
    """Register effllm's name in the modules of `NAMES`, now or when they are imported; nothing is measured."""
    for target in () if _is_attached else NAMES:
        when_imported(target, partial(_hook_module, target))


def _hook_module(target: str, module: ModuleType) -> None:
    """Import the hook file of a target, only now that the framework's module is there, and call its function."""
    from importlib import import_module

    hook_file, function = TARGETS[target].split(":")
    try:
        getattr(import_module(f"effllm.hooks.{hook_file}"), function)(module)
    except Unknown as error:
        print_once(f"this version of {module.__name__} is unknown, training goes on without its metrics: {error}")
        explain_at_exit(f"this version of {module.__name__} is unknown: {error}")
    except Exception as error:  # noqa: BLE001 - an import of the user must not fail because of effllm
        print_once(f"{module.__name__} could not be hooked, training goes on: {type(error).__name__}: {error}")
        explain_at_exit(f"{module.__name__} could not be hooked")
