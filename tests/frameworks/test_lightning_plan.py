"""The plan of the memory that a run of Lightning's Trainer records."""

from __future__ import annotations

import pytest

from effllm.memory.plan import MemoryPlan
from effllm.memory.recorded_plan import UnknownPlan, recorded_plan

pytest.importorskip("lightning", reason="needs Lightning")
pytest.importorskip("transformers", reason="needs transformers")
pytestmark = [pytest.mark.torch, pytest.mark.system("lightning", how="ran")]

SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import tiny, torch
import lightning.pytorch as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny.llama(num_hidden_layers=2)
        self.others = torch.nn.ModuleList({others})
    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss
    def configure_optimizers(self):
        return torch.optim.{optimizer}(self.model.parameters(), lr=0.1)

module = Module()
{before}
loader = torch.utils.data.DataLoader(tiny.rows(48), batch_size=4, collate_fn=tiny.collate)
trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                     enable_checkpointing=False, max_steps=4, {arguments})
trainer.fit(module, loader)
"""


def facts(frameworks, arguments="", optimizer="AdamW", before="", others="[]"):
    job = frameworks.run(SCRIPT.format(arguments=arguments, optimizer=optimizer, before=before, others=others))
    assert [line for line in job.our_errors if "callbacks" not in line] == []
    return job.ledger.facts


def test_language_model_in_a_module_states_its_plan(frameworks):
    found = facts(frameworks, "precision='bf16-mixed', accumulate_grad_batches=2, devices=1")

    plan = MemoryPlan(precision="bf16-mixed", seq_length=8, micro_batch=4, accumulation=2)
    assert recorded_plan(found, positions=32.0) == plan


def test_checkpointed_layers_are_seen(frameworks):
    before = "module.model.gradient_checkpointing_enable()"
    found = facts(frameworks, "precision='bf16-true', devices=1", optimizer="SGD", before=before)

    plan = MemoryPlan(precision="bf16", optimizer="sgd", checkpointing="full", seq_length=8, micro_batch=4)
    assert recorded_plan(found, positions=32.0) == plan


def test_second_model_has_no_plan(frameworks):
    found = facts(frameworks, "devices=1", others="[tiny.llama()]")

    with pytest.raises(UnknownPlan, match="no known plan"):
        recorded_plan(found, positions=32.0)
