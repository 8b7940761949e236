"""Counts of GenerationMixin.generate, in inference processes and in training."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from systems import RAN

pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.system("generate", how=RAN)

SCRIPT = Path(__file__).parents[2] / "integration" / "generate" / "generate.py"

MODEL = """
import json, torch, tiny
model = tiny.llama(pad_token_id=0, eos_token_id=2, bos_token_id=1).eval()
prompts = torch.tensor([[1, 5, 6, 7], [1, 8, 9, 10]])
def generate(**more):
    torch.manual_seed(1)
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, **more)
"""


def generated(job):
    return sum(row.generated_tokens for row in job.ledger.ranks)


def test_each_generate_call_is_counted_as_an_iteration(frameworks):
    job = frameworks.run(
        MODEL
        + """
count = 0
for _ in range(4):
    for row in generate(do_sample=True)[:, 4:].tolist():
        count += row.index(2) + 1 if 2 in row else len(row)
json.dump({"count": count}, open("truth.json", "w"))
"""
    )

    summary = job.ledger.summary
    assert (summary.status, summary.iterations, summary.samples, summary.parameters) == ("completed", 4, 8, 4656)
    assert generated(job) == job.output()["count"]
    assert sum(row.prompt_tokens for row in job.ledger.ranks) == 4 * 8
    assert job.ledger.facts["framework"] == "transformers"
    assert summary.metrics["it_tokens_per_sec"].value > 0
    assert not job.our_errors


def test_only_tokens_returned_by_generate_are_counted(frameworks):
    job = frameworks.run(
        MODEL
        + """
generate(min_new_tokens=12, num_beams=2)
generate(min_new_tokens=12, do_sample=True, num_return_sequences=3)
generate(min_new_tokens=12, return_dict_in_generate=True)
model.generate(inputs_embeds=torch.randn(1, 3, 16), max_new_tokens=5, min_new_tokens=5)
"""
    )

    assert generated(job) == 2 * 12 + 6 * 12 + 2 * 12 + 5
    assert job.ledger.summary.iterations == 4


def test_generated_tokens_are_unchanged(frameworks):
    code = MODEL + "json.dump({'ids': generate(do_sample=True).tolist()}, open('truth.json', 'w'))\n"

    without = frameworks.run(code, attach="0", metrics_enabled="false").output()["ids"]
    assert frameworks.run(code).output()["ids"] == without


def test_tokens_generated_during_training_are_counted(frameworks):
    job = frameworks.run(
        MODEL
        + """
from transformers import Trainer, TrainerCallback
class Asks(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        generate(min_new_tokens=12)
trainer = Trainer(model=model, args=tiny.arguments(), train_dataset=tiny.rows(12), data_collator=tiny.collate,
                  callbacks=[Asks()])
trainer.train()
"""
    )

    summary = job.ledger.summary
    assert (summary.iterations, generated(job)) == (6, 6 * 24)
    assert summary.time_by_class["generation"] > 0
    assert summary.samples == 12, "generation adds no training samples"


def test_generation_before_training_is_a_separate_run(frameworks):
    job = frameworks.start(
        MODEL
        + """
from transformers import Trainer
generate()
trainer = Trainer(model=model, args=tiny.arguments(), train_dataset=tiny.rows(12), data_collator=tiny.collate)
trainer.train()
tiny.losses(trainer)
"""
    )
    job.done(within_s=100.0)

    summaries = [json.loads((folder / "summary.json").read_text()) for folder in job.runs()]
    iterations = sorted(summary["iterations"] for summary in summaries)
    assert iterations == [1, 6]


def test_integration_prints_the_number_of_generated_tokens(launch):
    environ = launch.environ({"attach": "1"}, HF_HUB_OFFLINE="1")
    job = launch._job().start([sys.executable, str(SCRIPT), "--requests", "10"], environ).done(within_s=100.0)

    assert f"generated {generated(job)} tokens" in job.stdout
    assert (job.ledger.summary.iterations, job.ledger.summary.samples) == (10, 40)
    assert "IT (Tokens/Sec)" in job.stdout
