"""Train a tiny Llama with GRPO to generate the letter a. This file has no effllm code."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

LETTERS = ["<pad>", "<eos>", "<unk>", *" abcdefghijklmnopqrstuvwxyz"]


def tokenizer():
    letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def share_of_a(completions, **_):
    return [text.count("a") / max(len(text), 1) for text in completions]


def main():
    letters = tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=letters.pad_token_id,
        eos_token_id=letters.eos_token_id,
        bos_token_id=None,
    )
    on_cpu = not torch.cuda.is_available()
    arguments = GRPOConfig(
        output_dir="out/trl_grpo",
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=24,
        learning_rate=5e-3,
        max_steps=30,
        logging_steps=5,
        save_strategy="no",
        use_cpu=on_cpu,
        bf16=not on_cpu,
        report_to="none",
    )
    GRPOTrainer(
        model=LlamaForCausalLM(config),
        reward_funcs=share_of_a,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["write", "write an a", "go on"] * 200}),
        processing_class=letters,
    ).train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
