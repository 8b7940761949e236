"""Runs with all instruments at once: a plain loop, SFT and GRPO; every documented field has a value."""

from __future__ import annotations

import csv
import json
import math

import pytest
from nvml_library import GIB, Gpu, flat
from systems import RAN

from effllm.instruments._statistics import NAN
from effllm.instruments.results_csv import COLUMNS
from effllm.records.values import ValueSummary

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

PANEL = """
import dataclasses, json, os, time
import torch
from effllm import get_metrics_collector
from effllm.instruments import EnergyTrackingCallback, RobustGPUMonitor
from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker, TrainingLogger
from effllm.instruments.metrics import grpo_tracker
from effllm.instruments.profiling import ComprehensiveProfiler, GPUMemoryProfiler, ThroughputTracker, TrainingTimer
from effllm.instruments.results_csv import METADATA, append_row
from effllm.instruments.run_results import read_results
from effllm.instruments.token_counter import CountingCollator
import tiny

profiler, logger = ComprehensiveProfiler(device=0), TrainingLogger("logs", "run")
memory, timer, throughput = GPUMemoryProfiler(0), TrainingTimer(0), ThroughputTracker()
metrics, scores = MetricTracker(), ScoreDistributionTracker()
profiler.memory.set_baseline(), memory.set_baseline()
collator = CountingCollator(tiny.collate)

def begin_step():
    profiler.start_iteration(), profiler.timer.start("step"), timer.start("iteration")

def end_step(step, samples, tokens, scored):
    profiler.timer.stop("step"), profiler.end_iteration(samples, tokens)
    timer.stop("iteration"), throughput.update(samples, tokens), memory.measure("step", step)
    scores.update(scored)

def log(step, values, scored):
    logger.log_step(step, values, scored), metrics.update_batch(values, step)

def write(name, **more):
    found = {"profile": json.loads(profiler.export_to_json("profile.json").read_text()),
             "logger": json.loads(logger.export_all().read_text()),
             "checkpoint": json.loads(logger.save_checkpoint_metrics("last").read_text()),
             "memory": memory.get_summary(), "timer": timer.get_summary(),
             "throughput": throughput.get_current_throughput(), "scores": scores.get_distribution(),
             "metrics": {one: metrics.get_summary(one) for one in metrics.names}, **more}
    results = read_results(get_metrics_collector().run_folder, 30.0)
    append_row("results.csv", {**results.values, **dict.fromkeys(METADATA, name)})
    json.dump({**found, "not_measured": results.not_measured}, open("found.json", "w"))
    tiny.end()
"""

LOOP = """
import effllm
model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
optimizer = torch.optim.AdamW(model.parameters())
groups = GRPOMetricsTracker()
monitor = RobustGPUMonitor(0.1, baseline_wait_s=1.0)
with effllm.monitor(parameters=sum(one.numel() for one in model.parameters())) as measured:
    assert monitor.start_monitoring()
    begin_s = monitor.add_sync_marker("loop")
    loader = torch.utils.data.DataLoader(tiny.rows(520), batch_size=2, collate_fn=collator)
    for step, batch in enumerate(collator.over(loader), 1):
        begin_step()
        time.sleep(0.01)
        loss = torch.nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["input_ids"].flatten())
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        tokens = int(batch["attention_mask"].sum())
        end_step(step, 2, tokens, [0.5, 1.0, None])
        log(step, {"loss": loss.item()}, [0.5, 1.0, None])
        rewards = [0.1 * (step % 3), 0.7, 0.5]
        groups.update_grpo_step(step, loss, sum(rewards) / 3, {"format": 1.0}, kl_divergence=0.1)
        groups.update_group_rewards(rewards)
        measured.iteration(tokens=tokens, samples=2)
    since = monitor.get_metrics_since_timestamp(begin_s, wait_s=5.0)
    total = monitor.stop_monitoring()
counts = {name: getattr(collator, name) for name in ("batches", "samples", "tokens", "tokens_processed", "tokens_loss")}
write("loop", since=dataclasses.asdict(since), total=dataclasses.asdict(total), monitor=monitor.summary(),
      groups=groups.get_reward_distribution(), grpo={one: groups.get_summary(one) for one in groups.names},
      collator=counts)
"""

CALLBACKS = """
from transformers import TrainerCallback

class Panel(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        begin_step()
        time.sleep(0.1)
    def on_step_end(self, args, state, control, **_):
        end_step(state.global_step, 4, 26, [0.5, 1.0])
    def on_log(self, args, state, control, logs=None, **_):
        log(state.global_step, {name: value for name, value in logs.items() if name in ("loss", "grad_norm")}, [0.5])

energy = EnergyTrackingCallback(RobustGPUMonitor(0.1, baseline_wait_s=1.0), 0.5, carbon_intensity="document")
usual = dict(max_steps=30, logging_steps=1, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
             seed=1, output_dir="out", per_device_train_batch_size=4)
"""
GRPO = """
import trl
from datasets import Dataset
words = tiny.tokenizer()
model = tiny.llama(vocab_size=len(words), pad_token_id=0, eos_token_id=1, bos_token_id=None)
model.save_pretrained("model")
model.config._name_or_path = "model"
rows = Dataset.from_dict({"prompt": ["one two", "three four five"] * 8})
usual["max_steps"] = 12
arguments = trl.GRPOConfig(num_generations=4, max_completion_length=8, bf16=False, beta=0.1, **usual)
def letters(completions, **_):
    return [float(one.count("a")) for one in completions]
trainer = trl.GRPOTrainer(model=model, reward_funcs=letters, args=arguments, train_dataset=rows,
                          processing_class=words, callbacks=[Panel(), energy])
trainer.train()
groups = grpo_tracker()
write("grpo", groups=groups.get_reward_distribution(), grpo={one: groups.get_summary(one) for one in groups.names})
"""


def nulls(body, path=""):
    """Yield the paths of all values that are missing."""
    members = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for name, value in members:
        yield from nulls(value, f"{path}/{name}")
    if body is None or body == "" or (isinstance(body, float) and not math.isfinite(body)):
        yield path


#: Fields of a value in summary.json that are left out if they were not measured.
ALWAYS = set(ValueSummary.__struct_fields__) - {"unit", "not_finite"}


class Filled:
    """The outputs of a run."""

    def __init__(self, job):
        self.job, self.found = job, job.output("found.json")
        with (job.folder / "results.csv").open(newline="") as file:
            (self.row,) = csv.DictReader(file)
        summary = json.loads((job.ledger.folder / "summary.json").read_text())
        self.status, self.instruments = summary["status"], summary["instruments"]

    def check(self, *names):
        """Fail if a value is missing in the outputs of the script, in summary.json, or in the CSV file."""
        assert self.status == "completed"
        assert list(nulls({name: value for name, value in self.found.items() if name != "not_measured"})) == []
        assert self.found["not_measured"] == []
        assert {*COMMON, *names} - set(self.instruments) == set()
        assert {name: ALWAYS - set(one) for name, one in self.instruments.items() if ALWAYS - set(one)} == {}
        assert [name for name, one in self.instruments.items() if not one["count"] or not one["percentiles"]] == []
        assert list(self.row) == list(COLUMNS)
        assert list(nulls(self.row)) == []
        assert not self.job.our_errors

    def energy_files(self):
        return {path.name[:-21]: json.loads(path.read_text()) for path in (self.job.folder / "results").iterdir()}


#: Names in summary.json of the instruments that are in each of the three runs.
COMMON = {
    "memory/allocated_bytes", "memory/reserved_bytes", "timing/iteration_seconds", "timing/step_seconds",
    "throughput/samples", "throughput/tokens", "throughput/update_seconds", "scores/valid", "loss",
}  # fmt: skip
OF_GROUPS = {"group/reward", "group/reward_std", "policy_loss", "mean_reward", "kl_divergence"}


@pytest.fixture
def filled(frameworks, trace):
    def filled(code):
        trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0), memory=flat(8.0 * GIB)))
        environ = trace.environment()
        job = frameworks.run(PANEL + code, environ=environ, device="nvml", collection_interval=0.1, log_interval=5)
        return Filled(job)

    return filled


def test_every_field_of_a_plain_loop_has_a_value(filled):
    found = filled(LOOP)

    found.check(*OF_GROUPS, "reward/format", "scores/missing")
    assert found.found["memory"]["growth_interval_gb"]  # 260 measurements are enough for a trend
    assert found.found["collator"]["tokens"] == 260 * 13
    assert found.found["scores"]["invalid_count"] == 260


@pytest.mark.system("trl", how=RAN)
def test_every_field_of_a_grpo_training_has_a_value(filled):
    pytest.importorskip("trl", reason="needs TRL")
    found = filled(CALLBACKS + GRPO)

    found.check(*OF_GROUPS, "reward/letters", "grad_norm")
    assert found.found["groups"]["groups"] == 12
    files = found.energy_files()
    assert len(files) == 4
    assert list(nulls(files)) == []


def test_missing_values_are_found():
    assert list(nulls({"a": [1.0, None], "b": {"c": NAN}, "d": "", "e": 0})) == ["/a/1", "/b/c", "/d"]
