"""DeepSpeed's engine: loops of ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``, and the pipeline.

An iteration begins with the first forward pass after an optimizer step and ends with the next ``step`` in which
``global_steps`` increases.  With gradient accumulation, an iteration has several micro-batches.  The time between
``step`` and the next forward pass is the data wait.  A forward pass without gradients, or of a model in ``eval`` mode,
begins an evaluation; the evaluation lasts to the next training pass.

If there are several engines, the first engine that trains is the leader.  Parameters are counted for the whole model,
in any stage of ZeRO; with tensor parallelism or experts their number is unknown.  In a Hugging Face Trainer, the steps
of the Trainer are counted instead of the engine's steps.
"""

from __future__ import annotations

import sys
import time
import weakref
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._batches import Batches, inputs_of
from effllm.hooks._layout import zero_facts
from effllm.hooks._parameters import model_name, parameters_of
from effllm.hooks._steps import Steps, rank, version
from effllm.hooks._wrap import Call, Guard, around
from effllm.records.framework_figures import SAMPLES_PER_S
from effllm.trainer import ownership
from effllm.trainer.collector import get_metrics_collector

_GUARD = Guard("DeepSpeed")
_SYNC_GUARD = Guard("DeepSpeed's own time of ranks")
_TIMER_GUARD = Guard("DeepSpeed's throughput timer")
_COUNT_GUARD = Guard("the parameter count of DeepSpeed's model")


def attach(module: ModuleType) -> None:
    """Hook the engine, in ``deepspeed.runtime.engine``."""
    engine = getattr(module, "DeepSpeedEngine", None)
    if not (
        around(engine, "forward", _GUARD, before=_LOOP.forward_begins)
        and around(engine, "step", _GUARD, before=_LOOP.step_begins, after=_LOOP.step_ended)
    ):
        raise Unknown("deepspeed.runtime.engine has no DeepSpeedEngine with forward and step")
    around(engine, "backward", _SYNC_GUARD, before=_LOOP.backward_begins)
    _LOOP.wrap_checkpoint(engine)


def attach_pipeline(module: ModuleType) -> None:
    """Hook the engine of a pipeline, in ``deepspeed.runtime.pipe.engine``."""
    engine, begins, ends = getattr(module, "PipelineEngine", None), _LOOP.pipeline_begins, _LOOP.pipeline_ended
    if engine is None or not around(engine, "train_batch", _GUARD, before=begins, after=ends):
        raise Unknown("deepspeed.runtime.pipe.engine has no PipelineEngine.train_batch")
    around(engine, "eval_batch", _GUARD, before=_LOOP.pipeline_evaluates)


class _DeepSpeedLoop:
    def __init__(self) -> None:
        self._steps = Steps(ownership.CORE, "deepspeed", "Step")
        self._batches = Batches(self._steps)
        self._leader: Any = None  # a weak reference
        self._is_running = self._is_evaluating = False  # whether an iteration or an evaluation has begun and not ended
        self._idle_since_ns = 0  # end of the last micro-batch if no optimizer step followed; 0 during a micro-batch
        self._counts_data = self._counts_samples = True  # whether this rank counts its batches, and their samples
        self._at_last_log = (0, 0.0)  # steps and their time in s, in DeepSpeed's timer at its last log

    # --- the engine ---

    def forward_begins(self, call: Call) -> None:  # of a micro-batch of the leader, or of an evaluation
        engine = call.args[0]
        if getattr(engine, "pipeline_parallelism", False):
            return
        torch: Any = sys.modules["torch"]
        if not (engine.module.training and torch.is_grad_enabled()):
            self._begin_evaluation(engine)
        elif self._becomes_leader(engine):
            self._begin_micro_batch()
            if self._counts_data:
                inputs = inputs_of(engine.module, call.args[1:], call.kwargs)
                self._batches.add_batch(inputs, self._counts_samples)

    def backward_begins(self, call: Call) -> None:
        """Stamp the sync point before gradients are summed; under ZeRO-3, ranks wait for each other earlier."""
        engine = call.args[0]
        is_ours = self._is_leader(engine) and self._steps.is_owner
        if is_ours and engine.zero_optimization_stage() < 3 and engine.is_gradient_accumulation_boundary():
            get_metrics_collector().sync_point()

    def step_begins(self, call: Call) -> Any:
        """Return the leader's number of optimizer steps so far, for `step_ended`; ``None`` for other engines."""
        engine = call.args[0]
        return engine.global_steps if self._is_leader(engine) else None

    def step_ended(self, steps_before: int | None, call: Call, _result: Any) -> None:
        """End the iteration if the optimizer stepped; a step skipped after an overflow counts too."""
        if steps_before is None:
            return
        if call.args[0].global_steps == steps_before:
            self._idle_since_ns = time.monotonic_ns()
            return
        self._idle_since_ns, self._is_running = 0, False
        self._batches.end_iteration()
        _TIMER_GUARD(self._record_timer_rate, call.args[0])

    def _record_timer_rate(self, engine: Any) -> None:
        """When DeepSpeed logs its samples/s, read the totals from which it computes them: the mean since its last log.

        DeepSpeed counts rows of the configured batch; rows of packed sequences are no samples.
        """
        timer = engine.tput_timer
        if not timer.steps_per_output or timer.global_step_count % timer.steps_per_output:
            return
        (last_steps, last_s), self._at_last_log = self._at_last_log, (timer.global_step_count, timer.total_elapsed_time)
        if 0 < last_s < self._at_last_log[1] and not self._batches.has_packed:
            rate = timer.batch_size * (self._at_last_log[0] - last_steps) / (self._at_last_log[1] - last_s)
            self._steps.record_figures({SAMPLES_PER_S: rate})

    def wrap_checkpoint(self, engine: Any) -> None:
        self._steps.wrap_as_phase(engine, "save_checkpoint", "checkpoint", _GUARD, self._checkpoint_begins)

    def _checkpoint_begins(self, call: Call) -> bool:
        is_ours = self._is_leader(call.args[0])
        if is_ours:
            self._end_evaluation()
        return is_ours

    # --- the pipeline's engine ---

    def pipeline_begins(self, call: Call) -> bool:
        """Begin an iteration of a pipeline, which fetches its own batches."""
        if not self._becomes_leader(call.args[0]):
            return False
        self._begin_micro_batch()
        return True

    def pipeline_ended(self, is_ours: bool | None, call: Call, _result: Any) -> None:
        """End the iteration; the first stage counts the samples."""
        if is_ours:
            self._is_running = False
            engine = call.args[0]
            samples = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
            self._steps.end_counted(samples if self._counts_data and engine.is_first_stage() else 0)

    def pipeline_evaluates(self, call: Call) -> None:
        self._begin_evaluation(call.args[0])

    # --- both ---

    def _is_leader(self, engine: Any) -> bool:
        return self._leader is not None and self._leader() is engine

    def _becomes_leader(self, engine: Any) -> bool:
        """Return whether this engine leads, perhaps from now on; the first engine that trains starts the metrics."""
        if self._is_leader(engine):
            return self._steps.is_owner
        leader = self._leader() if self._leader is not None else None
        if leader is not None or not hasattr(engine.optimizer, "step") or not self._steps.claim():
            return False
        self._leader, self._at_last_log = weakref.ref(engine), (0, 0.0)
        self._begin(engine)
        return True

    def _begin(self, engine: Any) -> None:
        model_parallel = _call_first(engine, "get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
        self._counts_data = (
            model_parallel == 1 or _call_first(engine, "get_tensor_model_parallel_rank", "get_model_parallel_rank") == 0
        )
        sequence_parallel = getattr(engine, "sequence_parallel_size", 1) or 1
        own_rank = rank()
        self._counts_samples = own_rank % sequence_parallel == 0
        is_partly_here = model_parallel > 1 or getattr(engine, "has_moe_layers", False)
        is_partly_here = is_partly_here or bool(getattr(engine.module, "tied_comms", None))  # tied across stages
        counted = None if is_partly_here else _COUNT_GUARD(parameters_of, engine.module)
        is_pipeline = getattr(engine, "pipeline_parallelism", False)
        counts_them = engine.grid.get_data_parallel_rank() == 0 if is_pipeline else own_rank == 0
        is_new = not get_metrics_collector().is_collecting
        self._steps.begin_training(
            parameter_share=counted.share_of_rank(counts_them) if counted else None,
            first_iteration=engine.global_steps if is_new else None,
            facts={
                "framework_version": version("deepspeed"),
                "model": model_name(engine.module),
                **zero_facts(engine),
                "tensor_parallel": model_parallel,
                "sequence_parallel": sequence_parallel,
                "pipeline_parallel": getattr(engine, "num_stages", 1),
                "precision": "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
                "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
                "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
                "global_batch_size": engine.train_batch_size(),
            },
        )
        self._batches.set_model(engine.module, None if is_pipeline else counted)

    def _begin_micro_batch(self) -> None:
        self._end_evaluation()
        if self._idle_since_ns:
            self._steps.add_data_wait(time.monotonic_ns() - self._idle_since_ns)
            self._idle_since_ns = 0
        elif not self._is_running:
            self._is_running = True
            self._steps.start_step()

    def _begin_evaluation(self, engine: Any) -> None:
        if self._is_leader(engine) and not self._is_evaluating:
            self._is_evaluating = True
            self._steps.phase_start("evaluation")

    def _end_evaluation(self) -> None:
        if self._is_evaluating:
            self._is_evaluating = False
            self._steps.phase_end()
            if self._idle_since_ns:  # the evaluation is no data wait
                self._idle_since_ns = time.monotonic_ns()


def _call_first(engine: Any, *names: str) -> int:
    """Return the result of the first of these methods that the engine's process groups have; 1 without one."""
    groups = getattr(engine, "mpu", None)
    method = next((getattr(groups, name) for name in names if hasattr(groups, name)), None)
    return int(method()) if method is not None else 1


_LOOP = _DeepSpeedLoop()
