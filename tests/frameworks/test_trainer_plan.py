"""The plan of the memory that a real Trainer's run records, and what it cannot describe."""

from __future__ import annotations

import pytest
from systems import RAN

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
