"""axolotl's trainer on the CPU; it needs older packages than the other tests, so no target of make installs it."""

from __future__ import annotations

import pytest

pytest.importorskip("axolotl", reason="needs axolotl 0.19 and transformers 5.16")

SCRIPT = """
import time
import tiny
from datasets import Dataset
from transformers import TrainerCallback
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.training_args import AxolotlTrainingArguments

class Slow(TrainerCallback):
    def on_substep_end(self, *_, **__):
        time.sleep(0.02)

class Trainer(AxolotlTrainer):
    def _get_train_sampler(self, *_):
        return range(len(self.train_dataset))

arguments = AxolotlTrainingArguments(
    output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=72, logging_steps=3,
    use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", include_tkps=True, bf16=False,
    remove_unused_columns=False)
trainer = Trainer(model=tiny.llama(), args=arguments, train_dataset=Dataset.from_list(tiny.rows(600)),
                  data_collator=tiny.collate, callbacks=[Slow()])
trainer.train()
tiny.losses(trainer)
"""


def test_labels_per_second_of_axolotl_are_compared_with_the_tokens(frameworks):
    """Rows have 5 or 8 tokens; the first token of a row has no label: 11 labels of 13 tokens."""
    job = frameworks.start(SCRIPT, log_interval=3).done(within_s=250.0)  # imports take a minute

    (found,) = job.ledger.summary.audit.figures
    assert found.name == "framework/tokens_per_second_per_gpu"
    assert found.factor == pytest.approx(11 / 13, rel=0.05)
    assert not job.ledger.event_texts("audit")
