"""Trainers of transformers, attached only by environment variables: counts, excluded times, and unchanged losses."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from systems import RAN

from effllm.records.board import LOGGED

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")
torch = pytest.importorskip("torch", reason="needs PyTorch")

pytestmark = pytest.mark.system("transformers", how=RAN)

PLAIN = """
from transformers import Trainer
import tiny

trainer = Trainer(model=tiny.llama(), args=tiny.arguments({arguments}), train_dataset=tiny.rows(48),
                  eval_dataset=tiny.rows(4), data_collator=tiny.collate{more})
{before}
trainer.train({train})
{after}
tiny.losses(trainer)
"""


def script(arguments="", more="", before="", after="", train=""):
    return PLAIN.format(arguments=arguments, more=f", {more}" if more else "", before=before, after=after, train=train)


def counts(job):
    """Return three sums over all ranks: tokens, positions with padding, positions with a label."""
    rows = job.ledger.ranks
    return tuple(sum(getattr(row, name) for row in rows) for name in ("tokens", "tokens_processed", "tokens_loss"))


#: In place of the random sampler, so that every batch has rows of both lengths.
IN_ORDER = "trainer._get_train_sampler = lambda *_: range(48)"
HAND = "__import__('effllm').EfficientLLMCallback()"
#: ms-swift does this when it is imported.
REPLACED = """
import transformers.trainer
transformers.trainer.DEFAULT_CALLBACKS = [transformers.trainer.DefaultFlowCallback]
"""
#: In transformers, each process is rank 0 of a world of one, as with DeepSpeed without ``use_cpu``.
EACH_IS_RANK_0 = """
import os, torch
torch.distributed.init_process_group('gloo')
[os.environ.pop(name) for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')]
"""
EVALUATIONS = "trainer.evaluate(); trainer.predict(tiny.rows(4))"
IMAGES = """
from transformers import Trainer, ViTConfig, ViTForImageClassification
import tiny, torch

model = ViTForImageClassification(ViTConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, image_size=8, patch_size=4, num_labels=3))
rows = [{"pixel_values": torch.zeros(3, 8, 8), "labels": i % 3} for i in range(24)]
Trainer(model=model, args=tiny.arguments(), train_dataset=rows).train()
"""
OWN_STEP = f"""
from transformers import Trainer
import tiny

class Mine(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss.detach()

trainer = Mine(model=tiny.llama(), args=tiny.arguments(), train_dataset=tiny.rows(48), data_collator=tiny.collate)
{IN_ORDER}
trainer.train()
"""
ENCODER_DECODER = """
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration
import tiny, torch

model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                                            decoder_start_token_id=0))
row = {"input_ids": torch.arange(1, 7), "attention_mask": torch.tensor([1, 1, 1, 1, 1, 0]),
       "labels": torch.tensor([3, 4, 5, -100])}
arguments = Seq2SeqTrainingArguments(output_dir="out", per_device_train_batch_size=2, max_steps=4, use_cpu=True,
                                     logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True)
Seq2SeqTrainer(model=model, args=arguments, train_dataset=[row] * 16).train()
"""
PACKED = f"""
from transformers import DataCollatorWithFlattening, Trainer
import tiny

rows = [{{**row, "labels": row["input_ids"]}} for row in tiny.rows(48)]
trainer = Trainer(model=tiny.llama(), args=tiny.arguments(), train_dataset=rows,
                  data_collator=DataCollatorWithFlattening())
{IN_ORDER}
trainer.train()
"""
#: FSDP2 shards the model during loading: each parameter is a DTensor, and each rank has half of its elements.
SHARDED = f"""
from transformers import LlamaForCausalLM, Trainer
from transformers.distributed import DistributedConfig
import os, tiny, torch

torch.distributed.init_process_group("gloo")
if os.environ["RANK"] == "0":
    tiny.llama().save_pretrained("model")
torch.distributed.barrier()
model = LlamaForCausalLM.from_pretrained("model", distributed_config=DistributedConfig(fsdp_size=2))
assert sum(p.to_local().numel() for p in model.parameters()) < 4656
trainer = Trainer(model=model, args=tiny.arguments(), train_dataset=tiny.rows(48), data_collator=tiny.collate)
{IN_ORDER}
trainer.train()
tiny.end()
"""
#: The backend "eager" compiles no code; it wraps the model like other backends.
COMPILED = "torch_compile=True, torch_compile_backend='eager'"
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
use_cpu: true
num_processes: 2
num_machines: 1
mixed_precision: 'no'
fsdp_config: {fsdp_version: 2}
"""

# 6 steps of two rows: 5 tokens padded to 8 positions, and 8 tokens; the first token of a row has no label.
COUNTS = (6 * (5 + 8), 6 * 2 * 8, 6 * (4 + 7))
TWICE = tuple(2 * count for count in COUNTS)
USUAL = {"iterations": 6, "samples": 12, "parameters": 4656}
BY_MASK = {**USUAL, "counts": COUNTS, "token_source": "attention mask"}
OF_TWO = {**USUAL, "samples": 24, "counts": TWICE}
#: Scripts, their start, and values of the summary and facts of their runs.
TRAININGS = {
    "two lengths": (script(before=IN_ORDER), {}, BY_MASK),
    "default callbacks are replaced": (REPLACED + script(before=IN_ORDER), {}, BY_MASK),
    "training_step is overridden": (OWN_STEP, {}, BY_MASK),
    "compiled": (script(COMPILED, before=IN_ORDER), {}, {**BY_MASK, "model_type": "llama"}),
    "evaluate and predict": (script(before=EVALUATIONS + "\n" + IN_ORDER, after=EVALUATIONS), {}, BY_MASK),
    "accumulated micro-batches": (script("gradient_accumulation_steps=2", before=IN_ORDER), {}, OF_TWO),
    "two processes": (script(before=IN_ORDER), {"ranks": 2}, {**OF_TWO, "parallel_layout": "DDP"}),
    "each process is rank 0": (EACH_IS_RANK_0 + script(before=IN_ORDER), {"ranks": 2}, {"parameters": 4656}),
    "FSDP2": (SHARDED, {"ranks": 2}, {**OF_TWO, "device_mesh": "pp=1 fsdp=2 tp=1", "parallel_layout": "FSDP"}),
    # accelerate has no FSDP on CPUs
    "accelerate launch": (script(before=IN_ORDER), {"accelerate": ACCELERATE}, {**OF_TWO, "parallel_layout": "DDP"}),
    # a row with two sequences, of 5 and of 8 tokens; the first label of each sequence is masked
    "packed": (PACKED, {}, {"samples": 12, "counts": (78, 78, 66), "token_source": "packed, without padding"}),
    # 4 steps of 2 rows; 5 of 6 positions in the encoder and 3 of 4 positions in the decoder are tokens
    "encoder and decoder": (ENCODER_DECODER, {}, {"samples": 8, "counts": (64, 80, 24), "trainer": "Seq2SeqTrainer"}),
    "images": (IMAGES, {}, {"iterations": 6, "samples": 12, "tokens": None, "token_source": "no text in the batch"}),
    "callback of the script, attached": (script(more=f"callbacks=[{HAND}]", before=IN_ORDER), {}, BY_MASK),
    "callback of the script": (script(more=f"callbacks=[{HAND}]", before=IN_ORDER), {"attach": "0"}, BY_MASK),
    "callback by name, attached": (script("report_to='efficientllm'", before=IN_ORDER), {}, BY_MASK),
    "callback by name": (script("report_to='efficientllm'", before=IN_ORDER), {"attach": "0"}, BY_MASK),
}  # fmt: skip


@pytest.mark.parametrize(("code", "start", "expected"), TRAININGS.values(), ids=TRAININGS)
def test_counts_of_a_training_are_those_of_its_batches(frameworks, tmp_path, code, start, expected):
    options = dict(start)
    if "accelerate" in start:
        (tmp_path / "accelerate.yaml").write_text(options.pop("accelerate"))
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        options["launcher"] = [*launcher, str(tmp_path / "accelerate.yaml")]
    job = frameworks.run(code, **options)

    found = {**job.ledger.facts, "counts": counts(job)}
    found |= {name: getattr(job.ledger.summary, name) or None for name in (*USUAL, "tokens")}
    assert {name: found[name] for name in expected} == expected
    assert job.ledger.summary.coverage.ranks_reporting == (1 if start.keys() <= {"attach"} else 2)
    assert not job.our_errors


def test_effllm_attaches_to_a_script_that_imports_transformers(frameworks):
    """The import of transformers loads torch and the hooks of effllm."""
    job = frameworks.run(script())

    summary, facts = job.ledger.summary, job.ledger.facts
    assert (summary.status, summary.iterations, summary.samples) == ("completed", 6, 12)
    assert [block["iteration"] for block in job.blocks] == ["2", "4", "6"]
    assert {block["style"] for block in job.blocks} == {"Step"}
    assert (facts["framework"], facts["trainer"], facts["model_type"]) == ("transformers", "Trainer", "llama")
    assert facts["model"] == summary.model == "LlamaForCausalLM"
    assert (facts["per_device_batch_size"], facts["precision"], facts["parallel_layout"]) == (2, "fp32", "single")
    assert not job.our_errors


def test_no_callback_is_added_to_a_trainer_from_which_the_user_removed_it(frameworks):
    code = """
ours = [one for one in trainer.callback_handler.callbacks if "effllm" in type(one).__module__]
assert len(ours) == 1
trainer.remove_callback(ours[0])
"""
    after = """
assert not [one for one in trainer.callback_handler.callbacks if "effllm" in type(one).__module__]
"""
    frameworks.run(script(before=code, after=after))


@pytest.mark.parametrize("is_filtered", [True, False])
def test_non_finite_losses_are_counted_if_the_trainer_replaces_them(frameworks, is_filtered):
    """By default the Trainer logs a mean of other losses instead of NaN; the weights do not change in this test."""
    broken = """
losses = iter([0, 0, 1, 0, float("inf"), float("nan")] * 2)
trainer.compute_loss_func = lambda outputs, labels, **_: outputs["logits"].sum() * 0 + 1.0 + next(losses)
"""
    job = frameworks.run(script(f"logging_nan_inf_filter={is_filtered}", before=broken))

    summary = job.ledger.summary
    assert (summary.losses_not_finite, summary.first_not_finite) == (2, 5)
    assert len(job.ledger.event_texts("loss_not_finite")) == 1
    assert [loss for loss in job.output()["losses"] if loss == loss][:4] == [1.0, 1.0, 2.0, 1.0]


def test_flops_are_computed_from_the_width_of_each_batch(frameworks):
    """Batches of 2 x 3 and 2 x 8 tokens alternate; the mean batch width of a token is (3 x 6 x 3 + 3 x 16 x 8) / 66."""
    code = script(before=IN_ORDER)
    code = code.replace("tiny.rows(48)", "tiny.rows(48, (3, 3, 8, 8))")

    job = frameworks.run(code)

    width = (18 * 3 + 48 * 8) / 66
    run = job.ledger.windows[-1].run
    assert run.constants.flops_per_token == pytest.approx(6 * (4656 - 64 * 16) + 12 * 16 * width)
    assert job.ledger.facts["sequence_length"] == round(width, 1)


def test_losses_are_unchanged_to_the_last_digit(frameworks):
    code = script("max_steps=8, gradient_accumulation_steps=2, eval_strategy='steps', eval_steps=4")

    without = frameworks.run(code, ranks=2, attach="0", metrics_enabled="false").output()["losses"]
    with_it = frameworks.run(code, ranks=2).output()["losses"]

    assert len(without) == 8
    assert with_it == without


def test_latency_does_not_include_evaluation_and_checkpoints(frameworks):
    """Each evaluation and each checkpoint sleeps for an extra 0.2 s; AL must not include this time."""
    slow = """
import time
inner = trainer.prediction_step
trainer.prediction_step = lambda *a, **k: (time.sleep(0.2), inner(*a, **k))[1]
save = trainer._save
trainer._save = lambda *a, **k: (time.sleep(0.2), save(*a, **k))[1]
"""
    arguments = "max_steps=4, eval_strategy='steps', eval_steps=2, save_strategy='steps', save_steps=2"
    arguments += ", load_best_model_at_end=True, per_device_eval_batch_size=4"
    summary = frameworks.run(script(arguments, before=slow)).ledger.summary

    assert summary.iterations == 4
    assert summary.time_by_class["evaluation"] >= 2 * 0.2
    assert summary.time_by_class["checkpoint"] >= 2 * 0.2
    assert summary.time_by_class["iterations"] < 0.4


def test_second_training_in_a_process_is_a_separate_run(frameworks):
    job = frameworks.run(script(after="trainer.train()"))

    runs = [json.loads((folder / "summary.json").read_text()) for folder in job.runs()]
    assert [run["iterations"] for run in runs] == [6, 6]
    assert [run["parameters"] for run in runs] == [4656, 4656]


@pytest.mark.parametrize(("error", "status"), [("RuntimeError", "failed"), ("KeyboardInterrupt", "interrupted")])
def test_exception_in_a_step_reaches_the_script_and_ends_the_run(frameworks, error, status):
    breaking = f"""
step = trainer.compute_loss
def compute_loss(*a, **k):
    if trainer.state.global_step == 3:
        raise {error}("the test's own")
    return step(*a, **k)
trainer.compute_loss = compute_loss
"""
    job = frameworks.start(script(before=breaking)).wait(100)

    assert job.code != 0
    assert error in job.stderr
    assert not job.left(within_s=8.0)
    assert (job.ledger.summary.status, job.ledger.summary.iterations) == (status, 3)


def test_no_run_folder_is_written_if_effllm_is_not_attached(frameworks):
    job = frameworks.run(script(), attach="0")

    assert job.runs() == []
    assert "EfficientLLM" not in job.stdout + job.stderr


LATER = """
class Later(TrainerCallback):
    seen = []
    def on_log(self, args, state, control, logs=None, **_):
        Later.seen.append(dict(logs))
    def on_step_end(self, *_, **__):
        time.sleep(0.3)
"""


@pytest.mark.parametrize("attach", ["0", "1"])
def test_earlier_callbacks_receive_logs_with_the_metrics(frameworks, attach):
    """If effllm's callback ran last, it would add metrics to logs that TensorBoard has already written."""
    code = f"""
from transformers import Trainer, TrainerCallback
import json, time, tiny
from pathlib import Path
{LATER}
hand = [] if {attach} else [{HAND}]
trainer = Trainer(model=tiny.llama(), args=tiny.arguments(max_steps=8, eval_strategy="steps", eval_steps=4),
                  train_dataset=tiny.rows(48), eval_dataset=tiny.rows(4), data_collator=tiny.collate,
                  callbacks=[Later(), *hand])
trainer.train()
Path("seen.json").write_text(json.dumps(Later.seen))
tiny.losses(trainer)
"""
    job = frameworks.run(code, attach=attach)

    logs = job.output("seen.json")
    steps = [one for one in logs if "loss" in one]
    keys = {key for key, _ in LOGGED.values()}
    assert "tokens_per_second_per_gpu" in steps[-1]
    ours = [value for one in logs for key, value in one.items() if key in keys]
    assert all(value == value for value in ours), "values that are not measured must be missing"
    assert not any(keys.intersection(one) for one in logs if "loss" not in one)
    assert not any(keys.intersection(one) for one in job.output()["history"])


def test_metrics_are_written_to_the_event_file_of_tensorboard(frameworks):
    pytest.importorskip("tensorboard")
    waiting = """
import time
from transformers import TrainerCallback
class Slow(TrainerCallback):
    def on_step_end(self, *_, **__):
        time.sleep(0.3)
trainer.add_callback(Slow)
"""
    job = frameworks.run(script("report_to=['tensorboard']", before=waiting), environ={"TENSORBOARD_LOGGING_DIR": "tb"})

    events = b"".join(path.read_bytes() for path in job.folder.rglob("events.out.tfevents*"))
    assert b"train/tokens_per_second_per_gpu" in events


def test_step_numbers_continue_after_a_training_is_resumed(frameworks, launch):
    code = script("max_steps=4, save_strategy='steps', save_steps=2", after="trainer.train('out/checkpoint-2')")

    job = frameworks.run(code)

    resumed = json.loads((job.runs()[-1] / "summary.json").read_text())
    assert resumed["iterations"] == 2
    assert "Step 4:" in job.stdout


def test_trainer_with_deepspeed_states_the_stage_and_the_precision(frameworks):
    pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    before = "import deepspeed\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    code = before + script(f"bf16=True, deepspeed={config}") + "tiny.end()\n"

    job = frameworks.run(code, ranks=2, environ={"DS_ACCELERATOR": "cpu"})

    facts = job.ledger.facts
    assert (facts["precision"], facts["parallel_layout"], facts["zero_stage"]) == ("bf16", "ZeRO", 2)
    assert not job.our_errors


class Mesh:
    """A fake device mesh with this rank's position in each dimension."""

    def __init__(self, **places):
        self.mesh_dim_names = tuple(places)
        self._places = places

    def get_local_rank(self, name):
        return self._places[name]


@pytest.mark.parametrize(
    ("places", "counts"),
    [
        ({"dp_shard": 1, "tp": 0}, True),
        ({"dp_shard": 0, "tp": 1}, False),
        ({"dp_replicate": 3, "cp": 0}, True),
        ({"dp_replicate": 0, "cp": 1}, False),
        ({"pp": 1, "fsdp": 0, "tp": 0}, False),
    ],
)
def test_shared_batch_is_counted_by_only_one_rank(places, counts):
    """The test calls only the selection of the rank, because accelerate runs no tensor or context parallelism on a
    CPU."""
    from effllm.hooks._trainer_facts import counts_positions_and_samples

    by_accelerate = SimpleNamespace(accelerator=SimpleNamespace(torch_device_mesh=Mesh(**places)), model=None)
    by_transformers = SimpleNamespace(accelerator=None, model=SimpleNamespace(_device_mesh=Mesh(**places), config=1))

    assert counts_positions_and_samples(by_accelerate) == (counts, counts)
    assert counts_positions_and_samples(by_transformers) == (counts, counts)


def test_active_parameters_of_mixtral_exclude_unused_experts(frameworks):
    """Two of four experts are active; an expert has three matrices of 16 x 32, so half of the 6,144 parameters are
    not active."""
    code = """
from transformers import MixtralConfig, MixtralForCausalLM, Trainer
import json, tiny

model = MixtralForCausalLM(MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2))
open("truth.json", "w").write(json.dumps(sum(p.numel() for p in model.parameters())))
Trainer(model=model, args=tiny.arguments(), train_dataset=tiny.rows(48), data_collator=tiny.collate).train()
"""
    job = frameworks.run(code, parameters="active")

    assert job.ledger.summary.parameters == job.output() - 6144 // 2


#: A Trainer that counts one of four micro-batches, as in axolotl#3688.
MISCOUNTS = """
count, batches = trainer._track_num_input_tokens, iter(range(10**6))
trainer._track_num_input_tokens = lambda inputs: count(inputs) if next(batches) % 4 == 3 else None
"""


@pytest.mark.parametrize(
    ("counted", "arguments", "before", "factor"),
    [
        ("non_padding", "", "", None),
        ("all", "", "", 16 / 13),  # a step has 16 positions and 13 tokens
        ("non_padding", ", gradient_accumulation_steps=4", MISCOUNTS, 0.25),
    ],
    ids=["right", "with padding", "wrong"],
)
def test_count_of_the_trainer_is_stated_with_its_factor_if_it_differs(frameworks, counted, arguments, before, factor):
    arguments = f"max_steps=36, include_num_input_tokens_seen='{counted}'{arguments}"
    job = frameworks.run(script(arguments, before=before + IN_ORDER))

    name, summary = "framework/tokens_per_iteration", job.ledger.summary
    found = {one.name: one.factor for one in summary.audit.figures}
    assert found.get(name) == (factor and pytest.approx(factor))
    assert {name, "framework/tokens_per_second"} <= summary.instruments.keys()
    assert not job.ledger.event_texts("audit")
