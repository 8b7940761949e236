"""The training of the test scripts: a tiny model, and rows with few tokens that can be counted by hand."""

import json
from pathlib import Path

import torch


def llama(**changes):
    """Return a tiny Llama with 4,656 parameters, including 2 x 64 x 16 in the embedding and the head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(**{**sizes, "num_attention_heads": 2, "max_position_embeddings": 64, **changes})
    )


def rows(count, lengths=(5, 8)):
    """Return rows of tokens; their numbers of tokens alternate between the given lengths."""
    return [{"input_ids": list(range(1, 1 + lengths[i % len(lengths)]))} for i in range(count)]


def collate(batch):
    """Pad rows to the longest row; the first token of a row has no label."""
    width = max(len(row["input_ids"]) for row in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(batch):
        length = len(row["input_ids"])
        ids[i, :length] = torch.tensor(row["input_ids"])
        mask[i, :length] = 1
        labels[i, 1:length] = ids[i, 1:length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def arguments(**changes):
    """Return TrainingArguments for six steps on the CPU without any output files."""
    from transformers import TrainingArguments

    usual = {"output_dir": "out", "per_device_train_batch_size": 2, "max_steps": 6, "logging_steps": 1}
    usual |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 1}
    return TrainingArguments(**{**usual, **changes})


def losses(trainer):
    """Write the losses of the steps, with all digits, and the log history."""
    history = trainer.state.log_history
    if trainer.is_world_process_zero():
        record = {"losses": [one["loss"] for one in history if "loss" in one], "history": history}
        Path("truth.json").write_text(json.dumps(record))
    end()


def end():
    """Destroy the process group; otherwise gloo's threads may abort the process at its end."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def tokenizer(folder=None):
    """Return a tokenizer with a token per character; it needs no files."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<eos>", "<unk>", *" abcdefghijklmnopqrstuvwxyz0123456789.,:;!?+=-"]
    inner = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
