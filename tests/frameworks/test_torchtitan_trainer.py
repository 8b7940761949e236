"""torchtitan's Trainer and metrics on the CPU: its real steps and counts, with fakes of the GPU parts."""

from __future__ import annotations

import jobs
import pytest

pytest.importorskip("torchtitan.trainer", reason="needs torchtitan and its dependencies", exc_type=ImportError)
pytestmark = [*jobs.needs_torch, pytest.mark.system("torchtitan", how="ran")]

# Fakes in this script: the Trainer's __init__, model, loss, optimizers, checkpointer and mesh.
SCRIPT = """
import contextlib, time
from types import SimpleNamespace as N
import torch, torch.distributed as dist
from torchtitan import trainer
from torchtitan.components.metrics import LoggerContainer, MetricsProcessor
from torchtitan.tools.utils import GarbageCollection, NoColor

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
trainer.dist_utils.set_pg_timeouts = lambda **_: None

def processor(dims):
    made = MetricsProcessor.__new__(MetricsProcessor)
    made.parallel_dims, made.config = dims, MetricsProcessor.Config(log_freq=2)
    made.color, made.logger = NoColor(), LoggerContainer()
    made.ntokens_since_last_log, made.data_loading_times, made.time_last_log = 0, [], time.perf_counter()
    made.num_flops_per_token, made.gpu_peak_flops, made.has_quantization = 216, 1e12, False
    stats = N(max_active_gib=0, max_active_pct=0, max_reserved_gib=0, max_reserved_pct=0, num_alloc_retries=0,
              num_ooms=0)
    made.device_memory_monitor = N(get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    return made

class Small(trainer.Trainer):
    def __init__(self):
        off = {f"{name}_enabled": False for name in ("pp", "cp", "tp", "dp", "ep", "dp_cp")}
        self.parallel_dims = N(pp=1, get_optional_mesh=lambda name: None, non_data_parallel_size=1, **off)
        self.metrics_processor = processor(self.parallel_dims)
        self.device = torch.device("cpu")
        profiler = N(build=lambda **_: contextlib.nullcontext(N(step=lambda: None)))
        self.config = N(training=N(seq_len=8, steps=6, disable_cuda_graphs=True, max_norm=1.0), dump_folder=".",
                        checkpoint=N(load_step=-1), validator=N(enable=False), profiler=profiler,
                        comm=N(train_timeout_seconds=10))
        self.model_parts = [torch.nn.Linear(8, 4)]
        self.optimizers = torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)
        self.lr_schedulers = N(get_metrics=dict, step=lambda: None)
        self.checkpointer = N(load=lambda step: None, save=lambda *_, **__: None, maybe_wait_for_staging=lambda: None)
        self.gradient_accumulation_steps, self.num_pipeline_parallel_microbatches = 2, 1
        self.dataloader = [({"input": torch.ones(2, 8)}, torch.ones(2, 8).long()) for _ in range(20)]
        self.gc_handler = GarbageCollection()
        self.step = self.ntokens_seen = 0
    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens):
        self.ntokens_seen += labels.numel()
        loss = self.model_parts[0](input_dict["input"]).square().mean()
        loss.backward()
        return loss

Small().train()
dist.destroy_process_group()
"""


def test_training_loop_of_torchtitan_is_measured(launch):
    job = launch.code(SCRIPT, environ={"EFFICIENTLLM_ATTACH": "1", "EFFICIENTLLM_SINKS": "none"}).done(90)
    summary = job.ledger.summary
    # 6 steps of 2 batches with 2 x 8 labels
    assert (summary.iterations, summary.tokens, summary.samples, summary.parameters) == (6, 192, 24, 36)
    assert summary.status == "completed"
    assert summary.loss is not None
    facts = job.ledger.facts
    assert (facts["framework"], facts["parallel_layout"], facts["sequence_length"]) == ("torchtitan", "single", 8)
    assert job.our_errors == []


@pytest.mark.parametrize(("divisor", "stated"), [(1, []), (2, [0.5])])
def test_logged_tokens_per_second_are_compared_with_the_counts(launch, divisor, stated):
    """The tokens/s of torchtitan with a wrong divisor."""
    code = SCRIPT.replace("steps=6,", "steps=80,").replace("range(20)", "range(400)")
    code = code.replace("        loss.backward()", "        time.sleep(0.01)\n        loss.backward()")
    code = code.replace("non_data_parallel_size=1", f"non_data_parallel_size={divisor}")

    job = launch.code(code, environ={"EFFICIENTLLM_ATTACH": "1", "EFFICIENTLLM_SINKS": "none"}).done(90)

    found = {one.name: one.factor for one in job.ledger.summary.audit.figures}
    names = ("framework/tokens_per_second_per_gpu", "framework/tflops_per_gpu")
    assert found == {name: pytest.approx(factor, rel=0.05) for factor in stated for name in names}
    assert job.ledger.summary.instruments[names[0]].count > 5
