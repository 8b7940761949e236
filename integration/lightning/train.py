"""Train a small language model with Lightning. This file has no effllm code."""

from __future__ import annotations

import argparse
import logging
import warnings

import lightning.pytorch as lightning
import torch
from torch.nn import functional

VOCABULARY, LENGTH = 64, 32


class Model(lightning.LightningModule):
    """Predicts the next token from the previous token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.head = torch.nn.Linear(16, VOCABULARY)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        """Return the mean loss of the positions with a label."""
        scores = self.head(self.embedding(batch["input_ids"]))
        loss = functional.cross_entropy(scores[:, :-1].transpose(1, 2), batch["labels"][:, 1:])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log the loss of rows that are not used for training."""
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer of all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(num_rows: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of consecutive numbers; the last quarter of each sequence is padding."""
    found = []
    for row in range(num_rows):
        ids = (torch.arange(LENGTH) + row) % VOCABULARY
        mask = (torch.arange(LENGTH) < LENGTH * 3 // 4).long()
        found.append({"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--folder", default="lightning_logs")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0)
    torch.set_num_threads(1)
    trainer = lightning.Trainer(
        max_steps=given.steps,
        accelerator="cpu",
        devices=given.devices,
        strategy="ddp" if given.devices > 1 else "auto",
        accumulate_grad_batches=given.accumulate,
        val_check_interval=10,
        log_every_n_steps=5,
        default_root_dir=given.folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(rows(1024), batch_size=4)
    trainer.fit(Model(), loader, torch.utils.data.DataLoader(rows(8), batch_size=4))
    if trainer.is_global_zero:
        print("loss", float(trainer.callback_metrics["train_loss"]).hex())


if __name__ == "__main__":
    main()
