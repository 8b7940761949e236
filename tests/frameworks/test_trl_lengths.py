"""The largest micro-batch of TRL's trainers: `max_positions` against the batches of the real collators."""

from __future__ import annotations

import pytest
from systems import RAN

pytest.importorskip("trl", reason="needs TRL")
pytest.importorskip("datasets", reason="needs datasets")

pytestmark = pytest.mark.system("trl", how=RAN)

# Every fourth sample is longer than the limit of 12 tokens.  TRL's collators are called as in training.
SCRIPT = """
import json, tiny, trl
from datasets import Dataset
from effllm.hooks._trainer_facts import max_positions
from effllm.trainer.batch import read_batch
from transformers import LlamaForSequenceClassification

words = tiny.tokenizer()
model = tiny.llama(vocab_size=len(words), pad_token_id=0, eos_token_id=1, bos_token_id=None)
model.save_pretrained("model")
model.config._name_or_path = "model"
if {kind!r} == "Reward":
    model = LlamaForSequenceClassification.from_pretrained("model", num_labels=1)
answers = ["a" * (30 if i % 4 == 0 else 5 + i % 4) for i in range(32)]
columns = {{
    "SFT": {{"text": answers}},
    "KTO": {{"prompt": ["ab"] * 32, "completion": answers, "label": [True, False] * 16}},
}}.get({kind!r}, {{"prompt": ["ab"] * 32, "chosen": answers, "rejected": answers[::-1]}})
arguments = trl.{kind}Config(
    per_device_train_batch_size=4, max_steps=2, use_cpu=True, report_to="none", save_strategy="no", bf16=False,
    disable_tqdm=True, output_dir="out", {more}
)
trainer = trl.{kind}Trainer(model=model, args=arguments, train_dataset=Dataset.from_dict(columns),
                            processing_class=words)
trainer.train()
seen = [read_batch(batch).tokens_processed for batch in trainer.get_train_dataloader()]
open("truth.json", "w").write(json.dumps({{"limit": max_positions(trainer, trainer.args), "seen": seen}}))
"""

CUT = "max_length=12"


@pytest.mark.parametrize(
    "kind, more",
    [("SFT", CUT), ("DPO", CUT), ("KTO", CUT), ("KTO", f'{CUT}, loss_type="apo_zero_unpaired"')],
)
def test_longest_micro_batch_reaches_the_known_maximum(frameworks, kind, more):
    found = frameworks.run(SCRIPT.format(kind=kind, more=more)).output()

    assert max(found["seen"]) == found["limit"]


def test_reward_trainer_leaves_out_pairs_above_the_maximum(frameworks):
    """The pairs that are left have a prompt of 2 tokens and answers of at most 8 tokens: 10 tokens."""
    found = frameworks.run(SCRIPT.format(kind="Reward", more="max_length=10")).output()

    assert max(found["seen"]) == found["limit"] == 4 * 2 * 10


@pytest.mark.parametrize("kind", ["DPO", "Reward"])
def test_maximum_is_unknown_without_a_cut(frameworks, kind):
    assert frameworks.run(SCRIPT.format(kind=kind, more="max_length=None")).output()["limit"] is None
