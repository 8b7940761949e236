"""Fine-tune a tiny Llama on generated text with the Trainer. This file has no effllm code."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TEXTS = [f"count from {a} to {b} : " + " ".join(WORDS[a:b]) for a in range(9) for b in range(a + 1, 10)] * 20


def tokenizer():
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=["<pad>", "<eos>", "<unk>"]))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def main():
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
    )
    arguments = TrainingArguments(
        output_dir="out/transformers_sft",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=40,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=40,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    rows = [{"input_ids": words(text + " <eos>")["input_ids"]} for text in TEXTS]
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=rows[90:],
        eval_dataset=rows[:90],
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        processing_class=words,
    )
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
