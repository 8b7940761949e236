"""Create a tiny Llama, its tokenizer and data for LLaMA-Factory, without a download."""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ROWS = [
    {"instruction": f"Count from {WORDS[a]} to {WORDS[b]}.", "input": "", "output": ", ".join(WORDS[a : b + 1]) + "."}
    for a in range(9)
    for b in range(a + 1, 10)
] * 10


def tokenizer() -> PreTrainedTokenizerFast:
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    learn = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    pieces.train_from_iterator((text for row in ROWS for text in row.values()), learn)
    return PreTrainedTokenizerFast(tokenizer_object=pieces, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def main(folder: Path) -> None:
    pieces = tokenizer()
    config = LlamaConfig(
        vocab_size=len(pieces),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        pad_token_id=pieces.pad_token_id,
        bos_token_id=pieces.bos_token_id,
        eos_token_id=pieces.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    pieces.save_pretrained(folder / "model")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "counting.json").write_text(json.dumps(ROWS))
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"counting": {"file_name": "counting.json"}}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
