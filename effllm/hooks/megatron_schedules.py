"""megatron.core without Megatron's training loop: an optimizer step ends an iteration.

An iteration begins with the first pass through a schedule after an optimizer step.  A forward-only pass is an
evaluation.  Users' own loops, NeMo, Megatron-Bridge and verl are measured in this way.

The counts are computed from arguments of the schedule: number of micro-batches, micro-batch size, sequence length.
With ``variable_seq_lengths`` the schedule ignores the size and the length, so tokens and samples are not counted.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._steps import Steps
from effllm.hooks._wrap import Call, Guard, around, print_once
from effllm.hooks.megatron import configuration, layout_facts, parameter_share, peer_group_and_replica, reports_data
from effllm.trainer import ownership
from effllm.trainer.collector import get_metrics_collector

OPTIMIZER = "megatron.core.optimizer.optimizer"


def attach(module: ModuleType) -> None:
    """Hook all schedules; ``get_forward_backward_func`` chooses one of them."""
    schedules = [name for name, member in vars(module).items() if _is_schedule(name, member)]
    if not schedules:
        raise Unknown("it has no forward_backward_ function that takes num_microbatches")
    for name in schedules:
        begins, ends, fails = _iterations.pass_starts, _iterations.pass_ended, _iterations.pass_failed
        around(module, name, _guard, before=begins, after=ends, failed=fails)


def attach_optimizer(module: ModuleType) -> None:
    """Hook every optimizer class of this module that defines ``step``; calls of ``step`` may be nested."""
    classes = [
        member
        for member in vars(module).values()
        if isinstance(member, type) and member.__module__ == module.__name__ and "step" in vars(member)
    ]
    if not classes and module.__name__ == OPTIMIZER:
        raise Unknown("it has no optimizer with a step")
    for optimizer in classes:
        begins, ends, fails = _iterations.optimizer_starts, _iterations.optimizer_ended, _iterations.optimizer_failed
        around(optimizer, "step", _guard, before=begins, after=ends, failed=fails)


def attach_gradients(module: ModuleType) -> None:
    """Hook ``finalize_model_grads``: after its last backward pass, a rank first waits for other ranks there."""
    if not around(module, "finalize_model_grads", _sync_guard, before=lambda _: get_metrics_collector().sync_point()):
        raise Unknown("it has no finalize_model_grads: the own time of ranks is not measured")


def _is_schedule(name: str, member: Any) -> bool:
    is_named = name.startswith("forward_backward_")
    return is_named and inspect.isfunction(member) and "num_microbatches" in inspect.signature(member).parameters


class _Iterations:
    def __init__(self) -> None:
        self._steps = Steps(ownership.CORE, "megatron.core", "Iteration")
        self._count_guard = Guard("the parameter count of megatron.core's model")
        self._peers_guard = Guard("the rank's peer group in megatron.core")
        self._has_passes = False  # whether there was a pass since the last optimizer step
        self._depth = 0  # depth of nested optimizer steps
        self._samples = self._tokens = 0  # of the passes since the last optimizer step
        self._reports_data = False  # whether this rank counts them

    def pass_starts(self, call: Call) -> str:
        """Start an iteration at its first pass; but if the pass is forward-only, start an evaluation."""
        if call.get("forward_only"):
            self._steps.phase_start("evaluation")
            return "evaluation"
        if not self._has_passes and self._claim_and_begin(call):
            self._has_passes = True
            self._steps.start_step()
        return "training"

    def pass_ended(self, kind: str, call: Call, _result: Any) -> None:
        if kind == "evaluation":
            self._steps.phase_end()
        elif self._reports_data and self._has_passes:
            samples = call.get("num_microbatches") * call.get("micro_batch_size")
            self._samples += samples
            self._tokens += samples * call.get("seq_length")

    def pass_failed(self, kind: str) -> None:
        if kind == "evaluation":
            self._steps.phase_end()

    def optimizer_starts(self, _call: Call) -> None:
        self._depth += 1

    def optimizer_ended(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._has_passes:
            self._has_passes = False
            self._steps.end_step(self._tokens, self._samples)
            self._samples = self._tokens = 0

    def optimizer_failed(self, _before: None) -> None:
        self._depth -= 1

    def _claim_and_begin(self, call: Call) -> bool:  # whether this loop's iterations are counted
        if self._steps.is_owner:
            return True
        # Without Megatron's optimizer, no hook would end an iteration.
        if OPTIMIZER not in sys.modules or not self._steps.claim():
            return False
        chunks = call.get("model")
        chunks = chunks if isinstance(chunks, list | tuple) else [chunks]
        config = configuration(chunks[0])
        if getattr(config, "variable_seq_lengths", False):
            print_once("megatron.core is used with sequences of varying length: tokens and samples are not counted")
        else:
            self._reports_data = reports_data()
        self._steps.begin_training(
            parameter_share=self._count_guard(parameter_share, chunks), facts=_facts(call, chunks[0], config)
        )
        get_metrics_collector().set_peer_group(*(self._peers_guard(peer_group_and_replica) or ("",)))
        return True


def _facts(call: Call, chunk: Any, config: Any) -> dict[str, Any]:
    from megatron.core import parallel_state as groups

    experts = getattr(config, "num_moe_experts", None)
    replicas = groups.get_data_parallel_world_size()
    facts = {
        "tensor_parallel": groups.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": groups.get_pipeline_model_parallel_world_size(),
        "context_parallel": groups.get_context_parallel_world_size(),
        "expert_parallel": groups.get_expert_model_parallel_world_size() if experts else None,
        "data_parallel": replicas,
        **layout_facts(getattr(chunk, "ddp_config", None), replicas),
        "micro_batch_size": call.get("micro_batch_size"),
        "sequence_length": call.get("seq_length"),
        "num_layers": getattr(config, "num_layers", None),
        "hidden_size": getattr(config, "hidden_size", None),
        "num_experts": experts,
        "precision": next((name for name in ("fp8", "bf16", "fp16") if getattr(config, name, None)), "fp32"),
        "megatron_version": getattr(sys.modules.get("megatron.core"), "__version__", None),
    }
    return {fact: value for fact, value in facts.items() if value is not None}


_guard = Guard("megatron.core")
_sync_guard = Guard("megatron.core's own time of ranks")
_iterations = _Iterations()
