"""EnergyTrackingCallback with the Trainers of Hugging Face and TRL, and with trainings and callbacks that fail."""

from __future__ import annotations

import json

import pytest
from systems import RAN
from test_energy_callback import energy_j, read, script

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

transformers = pytest.mark.system("transformers", how=RAN)
trl = pytest.mark.system("trl", how=RAN)

BEGIN = """
import json, time
import tiny
from effllm.instruments import EnergyTrackingCallback, RobustGPUMonitor
from transformers import TrainerCallback

class Slow(TrainerCallback):
    logs = []
    def on_step_begin(self, args, state, control, **_):
        time.sleep(0.2)
    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))

monitor = RobustGPUMonitor(0.05)
callbacks = [Slow(), EnergyTrackingCallback(monitor, 0.5)]
usual = dict(max_steps=6, logging_steps=1, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
             seed=1, output_dir="out", per_device_train_batch_size=4)
"""
END = """
trainer.train()
json.dump(Slow.logs, open("logs.json", "w"))
tiny.losses(trainer)
"""
SEQ2SEQ = """
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                                            decoder_start_token_id=0))
trainer = Seq2SeqTrainer(model=model, args=Seq2SeqTrainingArguments(**usual), train_dataset=tiny.rows(48),
                         data_collator=tiny.collate, callbacks=callbacks)
"""
SFT = """
import trl
from datasets import Dataset

words = tiny.tokenizer()
model = tiny.llama(vocab_size=len(words), pad_token_id=0, eos_token_id=1, bos_token_id=None)
rows = Dataset.from_dict({"input_ids": [[5] * (5 if i % 2 else 8) for i in range(32)]})
trainer = trl.SFTTrainer(model=model, args=trl.SFTConfig(bf16=False, **usual), train_dataset=rows,
                         processing_class=words, callbacks=callbacks)
"""
GRPO = """
import trl
from datasets import Dataset

words = tiny.tokenizer()
model = tiny.llama(vocab_size=len(words), pad_token_id=0, eos_token_id=1, bos_token_id=None)
model.save_pretrained("model")
model.config._name_or_path = "model"
rows = Dataset.from_dict({"prompt": ["one two", "three four five"] * 8})
arguments = trl.GRPOConfig(num_generations=4, max_completion_length=8, bf16=False, **usual)
def reward(completions, **_):
    return [float(one.count("a")) for one in completions]
trainer = trl.GRPOTrainer(model=model, reward_funcs=reward, args=arguments, train_dataset=rows,
                          processing_class=words, callbacks=callbacks)
"""


@pytest.mark.parametrize(
    ("trainer", "needed", "attach"),
    [
        pytest.param(SEQ2SEQ, "transformers", "1", marks=transformers),
        pytest.param(SFT, "trl", "1", marks=trl),
        pytest.param(GRPO, "trl", "1", marks=trl),
        pytest.param(GRPO, "trl", "0", marks=trl),
    ],
    ids=["Seq2SeqTrainer", "SFTTrainer", "GRPOTrainer", "GRPOTrainer, not attached"],
)
def test_energy_of_every_step_of_a_trainer_is_measured(frameworks, trainer, needed, attach):
    pytest.importorskip(needed, reason=f"needs {needed}")
    job = frameworks.run(BEGIN + trainer + END, attach=attach)
    steps, logs = read(job, "energy_step_history"), job.output("logs.json")

    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5, 6]
    for one in steps:
        error_wh = one["energy_error_wh"] + one["energy_gain_error_wh"]
        assert abs(one["energy_consumed_wh"] - energy_j(one) / 3600) <= error_wh
        assert one["covered_s"] == pytest.approx(one["duration_s"])
    assert any("energy_step/energy_per_step_wh" in one for one in logs)
    assert logs[-1]["final_energy/total_energy_consumed_kwh"] > 0
    assert not job.our_errors


# --- trainings that fail, and callbacks that fail ---

FAILS_THEN_TRAINS = """try:
    trainer.train()
except ZeroDivisionError:
    pass
Slow.on_step_begin = lambda *_, **__: time.sleep(0.2)
{second}
"""


def histories(job):
    paths = sorted((job.folder / "results").glob("energy_step_history_*.json"))
    return [[one["step"] for one in json.loads(path.read_text())] for path in paths]


@transformers
@pytest.mark.parametrize(
    "second",
    [
        "trainer.train()",
        "Trainer(model=tiny.llama(), args=tiny.arguments(), train_dataset=tiny.rows(48), data_collator=tiny.collate,"
        " callbacks=[Slow(), EnergyTrackingCallback()]).train()",
    ],
    ids=["the same callback", "another callback"],
)
def test_training_after_a_failed_training_is_measured(frameworks, second):
    """Each training has its own files, whose names have different times."""
    wait = "\ntime.sleep(1.1)\n"
    train = FAILS_THEN_TRAINS.format(second=wait + second)
    job = frameworks.run(script(at_step="1 / (state.global_step - 3)", train=train))

    assert histories(job) == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert job.stdout.count("FINAL ENERGY REPORT:") == 2
    assert not job.our_errors


BREAKS = """
def fails(*_, **__):
    raise RuntimeError("in the callback")
"""


@transformers
def test_exception_in_the_callback_does_not_reach_the_training(frameworks):
    without = frameworks.run(script(step_s=0.0).replace(", energy]", "]")).output()["losses"]
    line = "the energy of steps is not measured any more, training goes on: RuntimeError: in the callback"
    for method, steps in (
        ("cut_span", [1, 2]),
        ("take_spans", [1, 2]),
        ("measure_baseline", []),
        ("start_monitoring", []),
    ):
        at_step = f"\n        if state.global_step == {len(steps)}: energy.monitor.{method} = fails"
        early = f"energy.monitor.{method} = fails\n" if not steps else ""
        code = script(at_step=at_step if steps else "", train=f"{early}trainer.train()", step_s=0.2)
        job = frameworks.run(BREAKS + code)

        assert job.output()["losses"] == without, method
        assert [one.count(line) for one in job.our_errors] == [1], method
        if method != "start_monitoring":  # the steps before the fault are in the files
            assert [one["step"] for one in read(job, "energy_step_history")] in (steps, steps[:-1])


@transformers
def test_energy_per_epoch_of_a_resumed_training_covers_its_own_epochs(frameworks):
    """24 rows in steps of 2 rows: 12 steps are one epoch; the resumed training has the steps 7 to 12."""
    more = 'max_steps=12, save_strategy="steps", save_steps=6'
    code = script(arguments=more, step_s=0.1).replace("tiny.rows(48)", "tiny.rows(24)")
    train = """trainer.args.max_steps = 6
trainer.train()
trainer.args.max_steps = 12
time.sleep(1.1)
trainer.train(resume_from_checkpoint="out/checkpoint-6")"""
    job = frameworks.run(code.replace("trainer.train()", train))
    paths = sorted((job.folder / "results").glob("energy_monitoring_summary_*.json"))
    first, second = (json.loads(path.read_text()) for path in paths)

    assert histories(job) == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    for one in (first, second):
        assert one["epochs"] == pytest.approx(0.5)
        assert one["energy_per_epoch_kwh"] == pytest.approx(one["energy_consumed_wh"] / 1000 / 0.5)
