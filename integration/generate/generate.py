"""Generate text for batches of prompts of three lengths with a tiny Llama. This file has no effllm code.

EFFICIENTLLM_ATTACH=1 python integration/generate/generate.py
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PAD, BEGIN, END = 0, 1, 2


def model() -> LlamaForCausalLM:
    """Return an untrained Llama with half a million parameters."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    tokens = {"pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}
    made = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_attention_heads=4, max_position_embeddings=512))
    return made.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def prompts(text: str, batch: int, length: int) -> torch.Tensor:
    """Return the bytes of a text as prompts; each row begins one byte after the row before."""
    ids = [3 + byte for byte in text.encode()]
    return torch.tensor([[BEGIN, *ids[row : row + length - 1]] for row in range(batch)])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=20)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--new-tokens", type=int, default=32)
    given = options.parse_args()
    llama = model()
    text = "What a model generates is what follows its prompt, until each sequence ends. " * 4
    generated = 0
    for number in range(given.requests):
        asked = prompts(text, given.batch, 16 + 8 * (number % 3)).to(llama.device)
        answer = llama.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=given.new_tokens, do_sample=True
        )
        for row in answer[:, asked.shape[1] :].tolist():
            generated += row.index(END) + 1 if END in row else len(row)
    print(f"generated {generated} tokens")


if __name__ == "__main__":
    main()
