"""torchtune's recipes for full fine-tuning on the CPU, started in the same way as by `tune run`."""

from __future__ import annotations

import pytest
from systems import RAN

pytest.importorskip("torchtune", reason="needs torchtune 0.6.1 and torchao")

pytestmark = pytest.mark.system("torchtune", how=RAN)

CPU = {"OMP_NUM_THREADS": "1"}
SCRIPT = """
import json, os, runpy, sys, types, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
import torchtune.training
from torchtune.models.llama2 import llama2

torch.set_num_threads(1)
# The distributed recipe reads the memory of a GPU, also on machines without a GPU.
torchtune.training.get_memory_stats = torchtune.training.log_memory_stats = lambda *_, **__: {}
torchtune.training.cleanup_before_training = lambda: None
recipe, ranks, packed, in_backward = sys.argv[1], int(sys.argv[2]), *(one == "True" for one in sys.argv[3:])
sizes = dict(vocab_size=32, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=16, max_seq_len=16)

class Tokenizer:
    pad_id = 0
    max_seq_len = 16

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24 * ranks

    def __getitem__(self, at):
        if at >= len(self):
            raise IndexError(at)
        length = 5 + at % 2 * 3  # half of them 5, half 8
        ids = list(range(1, 1 + length))
        return {"tokens": ids, "labels": [-100] + ids[1:]}

def rows(tokenizer, packed=False):
    from torchtune.datasets import PackedDataset
    return PackedDataset(Rows(), max_seq_len=16) if packed else Rows()

class Logger:
    def log_config(self, config):
        pass

    def log_dict(self, values, step):
        print("loss", float(values["loss"]).hex())

    def close(self):
        pass

parts = sys.modules["parts"] = types.ModuleType("parts")
parts.Tokenizer, parts.Logger, parts.rows = Tokenizer, Logger, rows
torch.manual_seed(0)
model = llama2(**sizes)
here = Path("rank-" + os.environ.get("RANK", "0"))
here.mkdir()
torch.save(model.state_dict(), here / "model.pt")
print("parameters", sum(one.numel() for one in model.parameters()))
config = {
    "output_dir": str(here),
    "tokenizer": {"_component_": "parts.Tokenizer"},
    "dataset": {"_component_": "parts.rows", "packed": packed},
    "model": {"_component_": "torchtune.models.llama2.llama2", **sizes},
    "checkpointer": {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(here),
        "checkpoint_files": ["model.pt"],
        "model_type": "LLAMA2",
        "output_dir": f"out-{here}",
    },
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
    "optimizer_in_bwd": in_backward,
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "metric_logger": {"_component_": "parts.Logger"},
    "gradient_accumulation_steps": 1 if in_backward else 2,
    **dict(resume_from_checkpoint=False, shuffle=False, seed=1, batch_size=4, epochs=2, max_steps_per_epoch=None),
    **dict(device="cpu", dtype="fp32", compile=False),
}
(here / "config.yaml").write_text(json.dumps(config))
script = Path(torchtune.__file__).parent.parent / "recipes" / f"{recipe}.py"
sys.argv = [str(script), "--config", str(here / "config.yaml")]
try:
    runpy.run_path(str(script), run_name="__main__")
finally:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


def losses(job):
    return [line for line in job.stdout.splitlines() if line.startswith("loss")]


def run(frameworks, recipe, ranks, packed=False, in_backward=False, attach="1"):
    return frameworks.run(SCRIPT, recipe, ranks, packed, in_backward, ranks=ranks, environ=CPU, attach=attach)


@pytest.mark.parametrize(("recipe", "ranks"), [("full_finetune_single_device", 1), ("full_finetune_distributed", 2)])
def test_torchtune_iterations_are_counted_and_losses_unchanged(frameworks, recipe, ranks):
    """Each rank has two epochs of 24 rows with 5 or 8 tokens; a batch has four rows; an iteration has two batches."""
    job = run(frameworks, recipe, ranks)

    summary, facts = job.ledger.summary, job.ledger.facts
    assert (summary.status, summary.iterations) == ("completed", 6)
    assert f"parameters {summary.parameters}" in job.stdout
    assert (summary.samples, summary.tokens) == (48 * ranks, 48 * ranks * (5 + 8) // 2)
    assert summary.time_by_class["checkpoint"] > 0
    assert (facts["framework"], facts["precision"], summary.model) == ("torchtune", "fp32", "rank-0")
    assert not job.our_errors

    without = run(frameworks, recipe, ranks, attach="0")
    assert len(losses(job)) == 6
    assert losses(job) == losses(without)


def test_packed_rows_are_counted_if_the_optimizer_runs_in_backward(frameworks):
    """A pack of 16 positions has two of the 24 rows, with 5 and 8 tokens; an iteration is a batch of four packs."""
    summary = run(frameworks, "full_finetune_single_device", 1, packed=True, in_backward=True).ledger.summary

    assert (summary.iterations, summary.samples, summary.tokens) == (6, 48, 48 * (5 + 8) // 2)


def test_tokens_per_second_of_torchtune_are_compared(frameworks):
    """torchtune counts positions with a label: 11 of the 13 tokens of two rows; reading a row takes 3 ms."""
    code = SCRIPT.replace("return 24 * ranks", "return 800").replace("epochs=2", "epochs=1, log_every_n_steps=1")
    code = code.replace("        length = 5 + at", "        __import__('time').sleep(0.003)\n        length = 5 + at")
    job = frameworks.run(code, "full_finetune_single_device", 1, False, False, environ=CPU, log_interval=5)

    (found,) = job.ledger.summary.audit.figures
    assert found.name == "framework/tokens_per_second_per_gpu"
    assert found.factor == pytest.approx(11 / 13, rel=0.15)
    assert not job.ledger.event_texts("audit")
