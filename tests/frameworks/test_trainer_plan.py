"""The plan of the memory that a real Trainer's run records, and what it cannot describe."""

from __future__ import annotations

import json

import pytest
from nvml_library import GIB, Gpu, Trace, flat
from systems import RAN
from typer.testing import CliRunner

from effllm.commands.app import app
from effllm.memory.config_json import read_config
from effllm.memory.estimate import estimate
from effllm.memory.plan import MemoryPlan
from effllm.memory.recorded_plan import UnknownPlan, recorded_plan

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")
pytest.importorskip("peft", reason="needs peft")

pytestmark = pytest.mark.system("transformers", how=RAN)

PLAIN = """
import json, tiny, torch
from pathlib import Path
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback
from effllm.hooks._trainer_plan import framework_plan

class Other(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        return super().compute_loss(model, inputs, return_outputs, **more)

def trainer(model=None, kind=Trainer, **arguments):
    return kind(model=model or tiny.llama(num_hidden_layers=2), args=tiny.arguments(**arguments),
                train_dataset=tiny.rows(48), data_collator=tiny.collate)

def lora(targets, model=None, **settings):
    model = model or tiny.llama(num_hidden_layers=2)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, **settings))

def short():
    return tiny.llama(num_hidden_layers=2).to(torch.bfloat16)

def frozen():
    model = tiny.llama()
    model.model.embed_tokens.requires_grad_(False)
    return model

QV, QKVO = ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]
"""
RECORDED = PLAIN + "trainer({}).train()\n"
#: Trainers that were prepared but do not train: their plan is asked for as the callback does.
ASKED = (
    PLAIN
    + """
found = {{}}
for text in {}:
    made = eval(f"trainer({{text}})")
    made.args.max_steps = 1
    class Asks(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_):
            found[text] = framework_plan(made, args, model)
            control.should_training_stop = True
    made.add_callback(Asks())
    made.train()
Path("truth.json").write_text(json.dumps(found))
"""
)

FP32 = MemoryPlan(precision="fp32", micro_batch=2, seq_length=8)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ("", {}),
        ("bf16=True, optim='adafactor'", {"precision": "bf16-mixed", "optimizer": "adafactor"}),
        (
            "lora('all-linear', short()), gradient_checkpointing=True, gradient_accumulation_steps=2",
            {"precision": "bf16", "checkpointing": "full", "accumulation": 2, "lora_rank": 4, "lora_targets": "all"},
        ),
    ],
)
def test_run_of_a_trainer_states_its_plan(frameworks, arguments, changes):
    job = frameworks.run(RECORDED.format(arguments))

    assert recorded_plan(job.ledger.facts, positions=16.0) == MemoryPlan(**{**vars(FP32), **changes})
    assert not job.our_errors


def test_two_ranks_state_data_parallelism(frameworks):
    job = frameworks.run(RECORDED.format(""), ranks=2)

    assert recorded_plan(job.ledger.facts, positions=16.0) == MemoryPlan(**{**vars(FP32), "dp": 2})


def test_trainer_with_deepspeed_states_the_stage(frameworks):
    pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    before = "import deepspeed\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    code = before + RECORDED.format(f"bf16=True, gradient_checkpointing=True, deepspeed={config}")

    job = frameworks.run(code + "tiny.end()\n", ranks=2, environ={"DS_ACCELERATOR": "cpu"})

    changes = {"precision": "bf16-zero", "checkpointing": "full", "dp": 2, "zero": 2}
    assert recorded_plan(job.ledger.facts, positions=16.0) == MemoryPlan(**{**vars(FP32), **changes})


#: Arguments of the script's Trainer -> changes of the plan; a text is the part of the plan that is missing.
CASES = {
    "short(), bf16=True": {"precision": "bf16"},
    "optim='sgd'": {"optimizer": "sgd"},
    "optim='rmsprop'": "optimizer",
    "gradient_checkpointing=True": {"checkpointing": "full"},
    "gradient_checkpointing=True, gradient_checkpointing_kwargs={'every_n_layers': 2}": "known",
    "lora(QV)": {"lora_rank": 4, "lora_targets": "qv"},
    "lora(QKVO, short()), bf16=True": {"precision": "bf16", "lora_rank": 4, "lora_targets": "attention"},
    "lora(['q_proj'])": "known",
    "lora(QV, layers_to_transform=[0])": "known",
    "lora(QV, use_dora=True)": "known",
    "lora(QV, modules_to_save=['lm_head'])": "known",
    "tiny.llama(attn_implementation='eager')": {"attention": "eager"},
    "frozen()": "known",
    "kind=Other": "known",
    "torch_compile=True": "known",
    "label_smoothing_factor=0.1": "known",
}


def test_plans_of_other_settings_are_right_or_not_stated(frameworks):
    found = frameworks.run(ASKED.format(list(CASES)), attach="0", metrics_enabled="false").output()

    assert found.keys() == CASES.keys()
    for arguments, text in found.items():
        expected = CASES[arguments]
        if isinstance(expected, str):
            with pytest.raises(UnknownPlan, match=f"no {expected}"):
                recorded_plan({"framework_plan": text}, positions=16.0)
        else:
            plan = recorded_plan({"framework_plan": text}, positions=16.0)
            assert plan == MemoryPlan(**{**vars(FP32), **expected}), arguments


#: The Trainer of a tiny model, with a stand-in for torch's allocator: there is no GPU.
ALLOCATOR = """
import tiny, torch
from transformers import Trainer, TrainerCallback

class Peak(TrainerCallback):
    def on_substep_end(self, *_, **__):
        now["peak"] = {peak}

trainer = Trainer(model=tiny.llama(), args=tiny.arguments(gradient_accumulation_steps=2, {arguments}),
                  train_dataset=tiny.rows(48, ({length} - 3, {length})), data_collator=tiny.collate,
                  callbacks=[Peak()])
trainer._get_train_sampler = lambda *_: range(48)
now = {{"current": {peak} // 2, "peak": {peak} // 2}}
torch.version.cuda = "13.0"
del torch.cuda.Event
for module in (torch.cuda, torch.cuda.memory):
    module.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.current_device = lambda: 0
torch._C._cuda_memoryStats = lambda _index: {{
    "allocated_bytes": {{"all": now}},
    "reserved_bytes": {{"all": {{"current": 2 * {peak}, "peak": 2 * {peak}}}}},
    "inactive_split_bytes": {{"all": {{"current": 0, "peak": 0}}}},
    "num_alloc_retries": 0,
    "num_ooms": 0,
}}
trainer.train()
"""

FIELDS = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
FIELDS |= {"intermediate_size": 32, "vocab_size": 64}


def test_run_folders_of_trainers_correct_the_estimate(frameworks, library, tmp_path):
    """Measured peaks are 1.0, 1.1 and 1.21 times the estimates of what the script trains."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FIELDS))
    shape, folder = read_config(FIELDS), tmp_path / "runs"
    trace = Trace(library, tmp_path / "trace")
    trace.write(Gpu("GPU-aaaa0001-0000-4000-8000-000000000001", "00000000:3B:00.0", memory=flat(8.0 * GIB)))
    trained = {
        "": MemoryPlan(precision="fp32", micro_batch=2, accumulation=2, seq_length=8),
        "bf16=True": MemoryPlan(micro_batch=2, accumulation=2, seq_length=32),
        "gradient_checkpointing=True, optim='adafactor'": MemoryPlan(
            precision="fp32", optimizer="adafactor", checkpointing="full", micro_batch=2, accumulation=2, seq_length=16
        ),
    }
    for (arguments, plan), ratio in zip(trained.items(), (1.0, 1.1, 1.21), strict=True):
        peak = round(ratio * estimate(shape, plan).allocated.expected)
        code = ALLOCATOR.format(peak=peak, arguments=arguments, length=plan.seq_length)
        job = frameworks.run(code, environ=trace.environment(), device="nvml", run_dir=str(folder))
        assert not job.our_errors

    command = ["fit", str(config), "--mode", "training", "--runs", str(folder), "--gpu", "h100-80gb", "--json"]
    [model] = json.loads(CliRunner().invoke(app, command).stdout)["models"]

    assert model["learned"]["left_out"] == {}
    assert model["learned"]["ratios"] == pytest.approx([1.0, 1.1, 1.21], rel=1e-3)
    before = estimate(shape, MemoryPlan())
    expected = 1.1 * before.allocated.expected + before.total.expected - before.allocated.expected
    assert model["training"]["total"]["expected"] == pytest.approx(expected, rel=1e-3)
