"""Count the storages of LitGPT's own training step at real sizes, beside its published peaks.

Explains what the estimates of docs/fit.md leave out: LitGPT's kernels, products of bitsandbytes before 0.43.2, which
keep their inputs, and the loss of the last micro-batch, which holds these inputs while the next one is computed.  The
tensors are fake, so nothing of the size of a model is allocated; the products of 4 bits are an imitation that allocates
what those of bitsandbytes do.  Needs the environment with transformers, and a checkout of LitGPT at commit 43c44323:
``python -m benchmarks.memory_litgpt CHECKOUT``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.memory.counted import Storages

KEEPS_INPUTS = [True]
CHUNK = 128  # tokens of a call of the head


@dataclass(frozen=True)
class Row:
    """A published row: micro-batch and tokens, rank of the adapters on queries and values, and the peak in GB."""

    model: str
    is_quantized: bool
    micro_batch: int
    tokens: int
    rank: int
    published: float
    micro_batches: int = 2  # the first micro-batch of the older rows has the longest text


ROWS = [
    Row("Llama-2-7b-hf", False, 1, 1304, 8, 21.30, 1),
    Row("Llama-2-7b-hf", False, 2, 1304, 8, 29.07, 1),
    Row("Llama-2-7b-hf", True, 1, 1304, 8, 14.14, 1),
    Row("Llama-2-13b-hf", False, 1, 1304, 8, 38.12, 1),
    Row("Llama-2-13b-hf", True, 1, 1304, 8, 23.14, 1),
    Row("Llama-2-7b-hf", False, 2, 512, 32, 19.77),
    Row("Mistral-7B-v0.1", False, 2, 512, 32, 20.66),
    Row("Llama-3-8B", False, 1, 512, 32, 19.73),
    Row("Llama-2-7b-hf", True, 2, 512, 32, 13.68),
    Row("Mistral-7B-v0.1", True, 2, 512, 32, 14.29),
    Row("Llama-3-8B", True, 2, 512, 32, 17.41),
]


class Product4Bit(torch.autograd.Function):
    """A product with a matrix of 4 bits: it makes a copy of 16 bits, casts it, and may keep its input."""

    @staticmethod
    def forward(ctx: Any, given: Any, shape: Any) -> Any:
        ctx.shape, ctx.kept = shape, given if KEEPS_INPUTS[0] else None
        return torch.nn.functional.linear(given, _copy(shape))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient.matmul(_copy(ctx.shape)), None


def _copy(shape: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.half).to(torch.bfloat16)


class Linear4Bit(torch.nn.Module):
    """Half a byte for each weight, and a scale of 32 bits for each 64."""

    def __init__(self, columns: int, rows: int, bias: bool = False, **_: Any) -> None:
        super().__init__()
        assert not bias
        self.shape, self.in_features, self.out_features, self.bias = (rows, columns), columns, rows, None
        self.weight = torch.nn.Parameter(torch.empty(rows * columns // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("scales", torch.empty(rows * columns // 64, dtype=torch.float))

    def forward(self, given: torch.Tensor) -> Any:
        return Product4Bit.apply(given, self.shape)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def counted(row: Row) -> float:
    """Return the peak of a row in bytes: all live storages, and the two states of torch's AdamW."""
    from litgpt import lora

    adapters = {"lora_r": row.rank, "lora_alpha": 16, "lora_dropout": 0.05, "lora_query": True, "lora_value": True}
    linear = Linear4Bit if row.is_quantized else torch.nn.Linear
    with FakeTensorMode(), patch.object(lora.LoRALinear, "reset_parameters"):
        with _default(torch.bfloat16), patch.object(torch.nn, "Linear", linear):
            model = lora.GPT(lora.Config.from_name(row.model, **adapters))
        lora.mark_only_lora_as_trainable(model)
        model.max_seq_length = row.tokens
        ids = torch.zeros((row.micro_batch, row.tokens), dtype=torch.long)
        storages = Storages()
        trained = [one for one in model.parameters() if one.requires_grad]
        for one in trained:
            one.grad = torch.zeros_like(one)
        for one in (*model.parameters(), *model.buffers(), *[one.grad for one in trained]):
            storages.number(one)
        with storages:
            for _ in range(row.micro_batches):
                with _default(torch.bfloat16):
                    chunks = model(ids, lm_head_chunk_size=CHUNK)
                losses = [_cross_entropy(one, part) for one, part in zip(chunks, ids.split(CHUNK, dim=1), strict=True)]
                loss = torch.cat(losses).sum()
                loss.backward()
        live = most = 0
        for _, change in storages.log:
            live += change
            most = max(most, live)
    # The optimizer of the quantized rows has paged states, which are not in torch's allocator.
    return most + (0 if row.is_quantized else sum(4 * one.numel() for one in trained))


def _cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), ids.reshape(-1), reduction="none")


def main() -> int:
    sys.path.insert(0, sys.argv[1])
    print("| run | published, GB | counted, GB | without kept inputs |\n|---|---|---|---|")
    for row in ROWS:
        sizes = []
        for KEEPS_INPUTS[0] in (True, False) if row.is_quantized else (True,):
            sizes.append(f"{counted(row) / 1e9:.2f}")
        name = f"{row.model} {row.micro_batch} x {row.tokens}{' nf4' if row.is_quantized else ''}"
        print(f"| {name} | {row.published:.2f} | {sizes[0]} | {''.join(sizes[1:])} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
