"""Stand-ins with the memory of bitsandbytes' linear modules, whose kernels have no fake tensors without a GPU.

They follow bitsandbytes 0.50.2 on CUDA (``autograd/_functions.py``, ``backends/cuda/ops.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _Product4bit(torch.autograd.Function):  # type: ignore[misc]
    """``MatMul4Bit``: forward and backward each make a copy of the matrix in the precision of the product."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, module: Any) -> Any:
        ctx.module = module
        return torch.nn.functional.linear(inputs, module.copied(inputs.dtype), module.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.matmul(gradient, ctx.module.copied(gradient.dtype)), None


class _Product8bit(torch.autograd.Function):  # type: ignore[misc]
    """``MatMul8bitLt``: products of whole numbers.

    The inputs are converted to fp16 and to 8 bits, the product is of 32 bits, and then of fp16.  The inputs are kept
    until the backward pass, which makes a copy of the matrix in their precision, although it does not read them.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Any, module: Any) -> Any:
        flat = ctx.inputs = inputs.reshape(-1, inputs.shape[-1])
        ctx.module, ctx.shape = module, inputs.shape
        rows, columns = flat.shape[0], module.out_features
        short = flat.to(torch.float16)
        whole, scales = torch.empty_like(short, dtype=torch.int8), flat.new_empty(rows, dtype=torch.float32)
        del short
        product = whole.new_empty(rows, columns, dtype=torch.int32)
        outputs = product.to(torch.float16).to(inputs.dtype)
        del product, whole, scales
        if module.bias is not None:
            outputs = outputs.add_(module.bias)
        return outputs.reshape(*inputs.shape[:-1], columns)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        flat = gradient.reshape(-1, gradient.shape[-1]).contiguous().to(ctx.inputs.dtype)
        return torch.matmul(flat, ctx.module.copied(ctx.inputs.dtype)).view(ctx.shape), None


class QuantizedLinear(torch.nn.Linear):  # type: ignore[misc]
    """A linear module of 4 bits (NF4 in blocks of 64, without double quantization) or 8 bits (a scale for each row)."""

    def __init__(self, module: Any, bits: int, computed: torch.dtype) -> None:
        columns, rows = module.weight.shape if type(module).__name__ == "Conv1D" else reversed(module.weight.shape)
        super().__init__(columns, rows, bias=False, device="meta")
        elements = rows * columns
        packed = torch.empty(
            *((-(-elements // 2), 1) if bits == 4 else (rows, columns)), dtype=_TYPES[bits], device="meta"
        )
        scales = torch.empty(-(-elements // 64) if bits == 4 else rows, dtype=torch.float32, device="meta")
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)
        if module.bias is not None:
            self.bias = torch.nn.Parameter(module.bias.to(computed), requires_grad=False)
        self.bits, self.computed = bits, computed

    def copied(self, computed: torch.dtype) -> torch.Tensor:
        """Return the matrix in a precision."""
        return torch.empty(self.out_features, self.in_features, dtype=computed)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the product, as PEFT's adapters take it: that of 4 bits is copied once more."""
        if self.bits == 8:
            return _Product8bit.apply(inputs, self)
        return _Product4bit.apply(inputs.to(self.computed), self).to(inputs.dtype).clone()


_TYPES = {4: torch.uint8, 8: torch.int8}


def quantize(model: Any, bits: int, computed: torch.dtype, skipped: Sequence[str] | None) -> None:
    """Replace the matrices of a model that transformers quantizes with bitsandbytes, and freeze all others.

    Args:
        model: of transformers, on the meta device.
        bits: 4 or 8.
        computed: the precision of the products.
        skipped: ``llm_int8_skip_modules`` of the config; None: the head, and modules with tied weights.
    """
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    left_out = HfQuantizer.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
    for name, module in list(model.named_modules()):
        is_matrix = type(module) is torch.nn.Linear or type(module).__name__ == "Conv1D"
        if is_matrix and should_convert_module(name, left_out):
            model.set_submodule(name, QuantizedLinear(module, bits, computed))
    model.requires_grad_(False)
