"""Megatron-LM and systems with its loop: a step is a call of ``train_step`` in ``megatron.training.training``.

The module's functions are looked up at each call, so they are wrapped in the module.  The positions of arguments
differ between versions (0.8 to 0.19 are known), so arguments are read by name.

``train_step`` itself fetches micro-batches.  From Megatron 0.10 on, micro-batches come from Megatron's own iterator
class.  Megatron requires this class, so its ``__next__`` is wrapped, and the iteration time excludes the wait for data.
In older versions, and on ranks that get their data from a peer, it includes the wait.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._batches import LazyNumber
from effllm.hooks._steps import Steps
from effllm.hooks._wrap import Call, Guard, around, print_once
from effllm.hooks.megatron import layout_facts, parameter_share, peer_group_and_replica, reports_data
from effllm.records.framework_figures import TFLOPS_PER_GPU
from effllm.trainer import ownership
from effllm.trainer.collector import get_metrics_collector
from effllm.trainer.session import status_after

NAME = "megatron"

#: Function whose calls are outside of iterations -> phase; in some versions, one of these functions calls another.
PHASES = {
    "evaluate": "evaluation",
    "evaluate_and_print_results": "evaluation",
    "save_checkpoint": "checkpoint",
    "save_checkpoint_and_time": "checkpoint",
}

#: Fact of run.json -> its name in Megatron's arguments.
FACTS = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "expert_tensor_parallel": "expert_tensor_parallel_size",
    "data_parallel": "data_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "rampup_batch_size": "rampup_batch_size",
    "sequence_length": "seq_length",
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocabulary_size": "padded_vocab_size",
    "num_experts": "num_experts",
    "experts_per_token": "moe_router_topk",
    "recomputation": "recompute_granularity",
    "optimizer": "optimizer",
    "seed": "seed",
}

#: The figure of ``--log-throughput`` in Megatron's log line, with one digit after the point.
THROUGHPUT = re.compile(r"throughput per GPU \(TFLOP/s/GPU\): (\d+\.\d)")
#: A smaller figure has a rounding error of more than 2 %.
MIN_TFLOPS = 2.5


def attach(module: ModuleType) -> None:
    """Hook a module that has Megatron's training loop."""
    missing = [name for name in ("train_step", "get_args") if not callable(getattr(module, name, None))]
    if missing:
        raise Unknown(f"it has no {' and no '.join(missing)}")
    training, guard = _Training(module), Guard("Megatron")
    around(module, "train_step", guard, before=training.step_starts, after=training.step_ended)
    is_wrapped = {
        "setup_model_and_optimizer": around(module, "setup_model_and_optimizer", guard, after=training.model_is_built),
        "training_log": around(module, "training_log", guard, before=training.before_log, after=training.after_log),
    }
    around(module, "print_rank_last", guard, before=training.read_throughput)
    for name, phase in PHASES.items():
        is_wrapped[name] = training.wrap_as_phase(name, phase, guard)
    for name in ("train", "pretrain"):
        around(module, name, guard, before=training.loop_begins, after=training.loop_ended, failed=training.loop_failed)
    absent = [name for name, exists in is_wrapped.items() if not exists]
    if absent:
        print_once(f"{module.__name__} has no {', '.join(absent)}: these functions are not measured")


def attach_data(module: ModuleType) -> None:
    """Hook Megatron's iterator class for data loaders; versions before 0.10 do not have this class."""
    iterator = getattr(module, "RerunDataIterator", None)
    if iterator is not None:
        steps = Steps(ownership.FRAMEWORK, NAME)
        around(
            iterator,
            "__next__",
            Guard("the wait for Megatron's data"),
            before=lambda _call: time.monotonic_ns(),
            after=lambda began_ns, *_: steps.add_data_wait(time.monotonic_ns() - began_ns),
        )


class _Training:
    """The run of the loop in this process; one run at a time."""

    def __init__(self, module: ModuleType) -> None:
        self._module: Any = module
        self._steps = Steps(ownership.FRAMEWORK, NAME)
        self._flops_guard = Guard("Megatron's number of floating-point operations")
        self._count_guard = Guard("the parameter count of Megatron's model")
        self._peers_guard = Guard("the rank's peer group in Megatron")
        self._depth = 0  # depth of nested calls of `pretrain` and `train`
        self._reset()

    def _reset(self) -> None:
        self._has_begun = False  # whether this run has tried to start the metrics
        self._reports_data = self._reports_loss = False  # whether this rank reports tokens and samples, and the loss
        self._num_replicas, self._replica = 1, 0  # of data parallelism; the replica of this rank
        self._unrecorded_end: tuple[int, int, int] | None = None  # of a step: time, positions and samples
        self._coming_loss: LazyNumber | None = None  # of a window's end; it may not have arrived from the GPU
        self._num_skipped = 0  # number of iterations without an update, for example after an overflow
        self._first_iteration = 0  # number of iterations that were completed before this run

    # --- from the first step to the last ---

    def model_is_built(self, _before: Any, _call: Call, result: Any) -> None:
        """Start the metrics: now the model exists, the checkpoint is loaded, and the arguments are final."""
        if not getattr(self._module.get_args(), "skip_train", False):
            self._begin(result[0])

    def _begin(self, model: Any) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        args = self._module.get_args()
        self._first_iteration = getattr(args, "iteration", 0) or 0
        flops = self._flops_guard(self._flops_per_token, args)
        facts = _facts(args)
        if flops:
            facts["flops_convention"] = "Megatron's num_floating_point_operations, forward and backward"
        if not self._steps.begin_training(
            parameter_share=self._count_guard(parameter_share, model if isinstance(model, list | tuple) else [model]),
            first_iteration=self._first_iteration,
            total_iterations=_total_iterations(args),
            flops_per_token=flops,
            facts=facts,
        ):
            return
        get_metrics_collector().set_peer_group(*(self._peers_guard(peer_group_and_replica) or ("",)))
        from megatron.core import parallel_state as groups

        self._reports_data = reports_data()
        self._replica, self._num_replicas = groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()
        self._reports_loss = self._reports_data and self._replica == 0

    def _flops_per_token(self, args: Any) -> float | None:
        count = getattr(self._module, "num_floating_point_operations", None)
        return count(args, args.global_batch_size) / (args.global_batch_size * args.seq_length) if count else None

    def loop_begins(self, _call: Call) -> None:
        self._depth += 1

    def loop_ended(self, *_: Any) -> None:
        """End the metrics at the end of the outermost call: ``pretrain`` evaluates and saves after the last step."""
        self._depth -= 1
        if self._depth == 0:
            self._finish("completed")

    def loop_failed(self, _before: Any) -> None:
        """End the metrics at once, because an exception ends this run even if it is caught."""
        self._depth -= 1
        self._finish(status_after(sys.exc_info()[1]))  # Megatron exits at a set iteration or time, or after a signal

    def _finish(self, status: str) -> None:
        if self._steps.is_owner:
            self._record_end()
            if self._num_skipped:
                get_metrics_collector().record_facts(skipped_iterations=self._num_skipped)
        self._steps.finish(status)
        self._reset()

    # --- steps ---

    def step_starts(self, call: Call) -> None:
        """Record the start of a step; without ``setup_model_and_optimizer`` the metrics begin here."""
        if not self._has_begun:
            self._begin(call.get("model"))
        if self._steps.is_owner:
            self._record_end()
            self._record_loss()
            self._steps.start_step()

    def step_ended(self, _before: Any, _call: Call, result: Any) -> None:
        """Record the end of a step with its counts; a batch ramp-up changes the number of micro-batches."""
        if not self._steps.is_owner:
            return
        ended_ns = time.monotonic_ns()
        samples = positions = 0
        if self._reports_data:
            args = self._module.get_args()
            samples = args.micro_batch_size * self._num_microbatches()
            positions = samples * args.seq_length
        self._num_skipped += bool(result[1])  # the second result of `train_step`
        self._unrecorded_end = (ended_ns, positions, samples)
        if not hasattr(self._module, "consume_seqlen_stats_in_iteration"):  # before 0.18: no count of tokens follows
            self._record_end()

    def _num_microbatches(self) -> int:
        if hasattr(self._module, "get_num_microbatches"):  # in any version
            return int(self._module.get_num_microbatches())
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        return int(get_num_microbatches())

    def _record_end(self, tokens: int | None = None) -> None:
        """Record the end of the last step; from Megatron 0.18 on, tokens without padding are known after the end."""
        if self._unrecorded_end is not None:
            (ended_ns, positions, samples), self._unrecorded_end = self._unrecorded_end, None
            self._steps.end_step(positions, samples, tokens, at_ns=ended_ns)

    def before_log(self, call: Call) -> None:
        """Read the arguments of Megatron's log: tokens of packed sequences; at the end of a window, also the loss."""
        if not self._steps.is_owner:
            return
        self._record_end(self._share_of_tokens(call.get("total_real_tokens_in_batch")))
        collector = get_metrics_collector()
        recorder, iteration = collector.recorder, call.get("iteration")
        if not self._reports_loss or call.get("skipped_iter") or recorder is None or iteration is None:
            return
        # If Megatron skips iterations, its iteration number is larger than the number of counted iterations.
        if collector.should_log(self._first_iteration + recorder.ordinal):
            loss = _main_loss(call.get("loss_dict"))
            self._coming_loss = LazyNumber(int(iteration), loss) if loss is not None else None

    def read_throughput(self, call: Call) -> None:
        """Read the throughput in a line that Megatron passes to its last rank's output; every rank has the line."""
        line = call.args[0] if call.args else None
        if self._steps.is_owner and isinstance(line, str) and (match := THROUGHPUT.search(line)):
            tflops = float(match[1])
            if tflops >= MIN_TFLOPS:
                self._steps.record_figures({TFLOPS_PER_GPU: tflops})

    def after_log(self, *_: Any) -> None:
        if self._steps.is_owner:
            self._record_loss()

    def _record_loss(self) -> None:
        if self._coming_loss is not None and (value := self._coming_loss.value_if_ready()) is not None:
            self._steps.record_loss(self._coming_loss.iteration, value)
            self._coming_loss = None

    def _share_of_tokens(self, job_tokens: Any) -> int | None:
        """Return this rank's share of the whole job's token count; 0 if this rank does not report data."""
        if isinstance(job_tokens, bool) or not isinstance(job_tokens, int | float):
            return None
        if not self._reports_data:
            return 0
        share, remainder = divmod(round(job_tokens), self._num_replicas)
        return share + (1 if self._replica < remainder else 0)  # so the shares of all replicas have the right sum

    # --- evaluations and checkpoints ---

    def wrap_as_phase(self, name: str, phase: str, guard: Guard) -> bool:
        """Hook a function whose calls are a phase; ``False`` if the module has no function of this name."""
        return self._steps.wrap_as_phase(self._module, name, phase, guard, self._phase_begins)

    def _phase_begins(self, _call: Call) -> bool:
        if self._steps.is_owner:
            self._record_end()
        return True  # each call is a phase


def _facts(args: Any) -> dict[str, Any]:
    facts = {fact: getattr(args, name, None) for fact, name in FACTS.items()}
    is_dense = not facts["num_experts"]  # Megatron sets defaults for experts even in a dense model
    facts = {name: fact for name, fact in facts.items() if fact is not None and not (is_dense and "expert" in name)}
    facts["precision"] = next((name for name in ("fp4", "fp8", "bf16", "fp16") if getattr(args, name, None)), "fp32")
    facts |= layout_facts(args, facts.get("data_parallel") or 1)
    batch: list[Any] = [facts.get(name) for name in ("global_batch_size", "sequence_length", "data_parallel")]
    if all(type(size) is int and size > 0 for size in batch):
        facts["max_positions_per_iteration"] = batch[0] * batch[1] // batch[2]
    version = getattr(sys.modules.get("megatron.core"), "__version__", None)
    if version:
        facts["megatron_version"] = version
    folder = getattr(args, "tensorboard_dir", None)
    if folder and "://" not in str(folder):
        facts["tensorboard_dir"] = os.path.abspath(folder)  # noqa: PTH100 - without access to the file system
    return facts


def _total_iterations(args: Any) -> int | None:
    iterations, samples = getattr(args, "train_iters", None), getattr(args, "train_samples", None)
    if iterations:
        return int(iterations)
    return int(samples) // int(args.global_batch_size) if samples else None


def _main_loss(losses: Any) -> Any:
    """Return the loss, preferably the language model's; Megatron has averaged it over replicas and micro-batches."""
    if not isinstance(losses, Mapping) or not losses:
        return None
    named = [name for name in losses if "loss" in str(name)]
    return losses["lm loss" if "lm loss" in losses else (named or list(losses))[0]]
