"""Train the model of a config for a step with fake tensors, and count its storages.

A process of its own, started by `effllm fit`: a config and a plan on stdin, a `MeasuredStep` as JSON on stdout.  The
model is on the meta device first; under FakeTensorMode, its operations have shapes and types, but no memory.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from effllm.config.isolated import NoAnswer, answer
from effllm.memory.estimate import MeasuredStep
from effllm.memory.model_count import build_model
from effllm.memory.plan import MemoryPlan

#: Names of layers with a state in place of attention, whose kernels are in packages of their own.
_RECURRENT = ("mamba", "deltanet", "rwkv", "mlstm", "linearattention", "lightningattention", "shortconv", "rglru")


def main(_arguments: Sequence[str]) -> None:
    answer(measured_step)


def measured_step(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `MeasuredStep` of a document with a config and a plan."""
    plan, fields = MemoryPlan(**document["plan"]), document["config"]
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # the error of an operation is raised as well
    _patch_transformers()
    try:
        model = build_model(
            fields,
            attn_implementation="eager" if plan.attention == "eager" else None,
            dtype=torch.float32 if plan.numbers.bytes_per_weight == 4 else _16_bit_type(plan),
        )
        kinds = {type(module).__name__.lower() for module in model.modules()}
        has_other_kernels = any(word in kind for kind in kinds for word in _RECURRENT)
        notes = list(_notes(model, plan, has_other_kernels))
        model = _prepared_for_training(model, plan, fields)
        with FakeTensorMode():
            _make_fake(model)
            return {**_measure_step(model, plan)._asdict(), "has_other_kernels": has_other_kernels, "notes": notes}
    except NoAnswer:
        raise
    except ImportError as error:
        raise NoAnswer(f"this needs a package that is not installed: {error}") from None
    except Exception as error:  # such as the code of a model that reads values, which fake tensors do not have
        lines = str(error).strip().splitlines() or [""]
        skip = "name the modules whose weights it reads in llm_int8_skip_modules of its quantization_config, or "
        raise NoAnswer(
            f"this model cannot be measured, because {type(error).__name__}: {lines[0][:200]}: "
            f"{skip if plan.base_bits else ''}train a step of it on a GPU, and read torch.cuda.max_memory_allocated()"
        ) from error


def _patch_transformers() -> None:
    """Replace what transformers does otherwise if it sees fake tensors.

    A row is one text: without a mask of packed texts, for which attention repeats keys and values.  Experts whose
    grouped product has no fake tensors have one product of the same sizes.
    """
    from transformers import masking_utils
    from transformers.integrations import moe

    grouped = moe._grouped_mm

    def product(tokens: Any, weight: Any, offs: Any) -> Any:
        if weight.dtype == torch.bfloat16 and not any(size % 8 for size in weight.shape[1:]):
            return grouped(tokens, weight, offs)
        with torch.autocast("cpu", enabled=False):
            return tokens.to(weight.dtype) @ weight[0]

    moe._grouped_mm = product
    masking_utils.find_packed_sequence_indices = lambda _position_ids: None


def _notes(model: Any, plan: MemoryPlan, has_other_kernels: bool) -> Iterator[str]:
    """Yield what is measured otherwise than a reader expects."""
    inner = model.config.get_text_config()
    if inner is not model.config:
        yield "measured with tokens of text alone: images need further activations"
    if plan.attention != "eager" and inner._attn_implementation == "eager":
        yield "measured with eager attention, because this model has no other"
    if any(hasattr(module, "is_concatenated") for module in model.modules()):
        yield f"measured with the {inner._experts_implementation} experts of transformers"
    if has_other_kernels:
        yield "measured without the kernels of mamba_ssm, causal_conv1d and fla: with them a step needs less"


def _16_bit_type(plan: MemoryPlan) -> torch.dtype:
    return torch.float16 if plan.precision.startswith("fp16") else torch.bfloat16


def _prepared_for_training(model: Any, plan: MemoryPlan, fields: Mapping[str, Any]) -> Any:
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    if plan.base_bits:
        skipped = (fields.get("quantization_config") or {}).get("llm_int8_skip_modules")
        quantize(model, plan.base_bits, torch.float32 if plan.precision == "fp32" else _16_bit_type(plan), skipped)
    if plan.lora_rank:
        from peft import LoraConfig, get_peft_model

        names = [name for name, module in model.named_modules() if _is_adapted(name, module, model, plan)]
        if not names:
            raise NoAnswer(f"no matrix has an adapter with --lora-targets {plan.lora_targets}: give all")
        model = get_peft_model(model, LoraConfig(r=plan.lora_rank, target_modules=names, lora_dropout=0.0))
        for module in model.modules():
            if plan.base_bits and plan.numbers.autocast and hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False  # PEFT's layers for bitsandbytes leave this to autocast
    if plan.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if plan.lora_rank:
            model.enable_input_require_grads()
    model.train()
    return model


def _is_adapted(name: str, module: Any, model: Any, plan: MemoryPlan) -> bool:
    """Return whether a module has an adapter: matrices of the text layers; Conv1D is that of GPT-2."""
    is_matrix = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    if not is_matrix or module is model.get_output_embeddings() or "vision" in name or "visual" in name:
        return False
    is_attention, leaf = "attn" in name or "attention" in name, name.rsplit(".", 1)[-1]
    is_qv = leaf in ("q_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
    return plan.lora_targets == "all" or (is_attention and (plan.lora_targets == "attention" or is_qv))


def _make_fake(model: Any) -> None:
    """Replace the tensors on the meta device by fake ones; a tied weight stays one tensor."""
    made: dict[int, Any] = {}  # by the id of a tensor on the meta device: this tensor, and the fake one

    def fake(tensor: Any) -> Any:
        if id(tensor) not in made:
            new = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = tensor, torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        return made[id(tensor)][1]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers, module.__dict__):
            tensors.update({name: fake(value) for name, value in tensors.items() if isinstance(value, torch.Tensor)})


def _measure_step(model: Any, plan: MemoryPlan) -> MeasuredStep:
    """Train for one step after the first, which makes the optimizer's states, and return its bytes."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sgd = torch.optim.SGD(trained, momentum=0.9 if plan.optimizer == "sgd-momentum" else 0.0)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained) if plan.optimizer == "adamw" else sgd
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()  # makes the states
    optimizer.zero_grad()
    tokens = torch.ones(plan.micro_batch, plan.seq_length, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    accepted = inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
    inputs |= {name: torch.zeros_like(tokens) for name in ("token_type_ids", "mm_token_type_ids") if name in accepted}
    storages = Storages()
    weights = storages.numbers_of(model.parameters())
    values = [value for state in optimizer.state.values() for value in state.values()]
    states = storages.numbers_of(value for value in values if isinstance(value, torch.Tensor) and value.dim())
    other = storages.numbers_of((*model.buffers(), *inputs.values()))
    with storages:
        for _ in range(min(plan.accumulation, 2)):  # a third micro-batch needs as much as the second
            with torch.autocast("cpu", dtype=_16_bit_type(plan), enabled=plan.numbers.autocast):
                loss = getattr(model(**inputs), "loss", None)
            if loss is None:
                raise NoAnswer("this model has no loss of labels, so that a step of it cannot be measured")
            loss.backward()
            del loss
        end_of_backward = len(storages.log)
        gradients = storages.numbers_of(parameter.grad for parameter in trained if parameter.grad is not None)
        optimizer.step()
    live = storages.live_at_peak(end_of_backward, without=other)
    return MeasuredStep(
        weights=storages.size(weights),
        optimizer_states=storages.size(states),
        gradients=storages.size(gradients),
        gradients_at_peak=storages.size(live & gradients),
        activations=storages.size(live - weights - states - gradients),
        peak=max(storages.size(live), storages.size(storages.live_at_peak(len(storages.log), without=other))),
    )


class Storages(TorchDispatchMode):  # type: ignore[misc]
    """Numbers the storages of the tensors that operations return, and logs when they appear and disappear."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []  # the number of each storage that appears, and -number when it disappears
        self._sizes = [0]  # bytes by number; the first number is 1, because 0 has no sign
        self._numbers: dict[int, int] = {}  # of the living storages, by address

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numbers_of(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def numbers_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the numbers of the storages of tensors, from 1 on; new ones are logged."""
        return {self._number_of(tensor.untyped_storage()) for tensor in tensors}

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._sizes)
            self.log.append(len(self._sizes))
            weakref.finalize(storage, lambda: self.log.append(-self._numbers.pop(key)))
            self._sizes.append(storage.nbytes())
        return self._numbers[key]

    def size(self, numbers: Iterable[int]) -> int:
        return sum(self._sizes[number] for number in numbers)

    def live_at_peak(self, end: int, without: set[int]) -> set[int]:
        """Return the storages that live when their sum is largest, in the log before a position."""
        live_bytes = peak_bytes = peak_end = 0
        for index, number in enumerate(self.log[:end]):
            if abs(number) not in without:
                live_bytes += self._sizes[number] if number > 0 else -self._sizes[-number]
                if live_bytes > peak_bytes:
                    peak_bytes, peak_end = live_bytes, index + 1
        numbers: set[int] = set()
        for number in self.log[:peak_end]:
            numbers ^= {abs(number)}  # added when it appears, removed when it disappears
        return numbers - without


# --- stand-ins with the memory of bitsandbytes' linear modules, whose kernels have no fake tensors without a GPU ---


class _Product4bit(torch.autograd.Function):  # type: ignore[misc]
    """``MatMul4Bit`` of bitsandbytes 0.50.2: both passes make a copy of the matrix in the precision of the product."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, module: Any) -> Any:
        ctx.module = module
        return torch.nn.functional.linear(inputs, module.dequantized_stand_in(inputs.dtype), module.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.matmul(gradient, ctx.module.dequantized_stand_in(gradient.dtype)), None


class _Product8bit(torch.autograd.Function):  # type: ignore[misc]
    """``MatMul8bitLt``: its inputs are kept until the backward pass, which makes a copy of the matrix."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, module: Any) -> Any:
        ctx.module, ctx.inputs = module, inputs
        quantized = torch.empty_like(inputs.to(torch.float16), dtype=torch.int8)
        _scales = inputs.new_empty(inputs.shape[:-1], dtype=torch.float32)
        product = quantized.new_empty(*inputs.shape[:-1], module.out_features, dtype=torch.int32)
        outputs = product.to(torch.float16).to(inputs.dtype)
        return outputs if module.bias is None else outputs.add_(module.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.matmul(gradient.to(ctx.inputs.dtype), ctx.module.dequantized_stand_in(ctx.inputs.dtype)), None


class QuantizedLinear(torch.nn.Linear):  # type: ignore[misc]
    """A linear module of 4 bits (NF4 in blocks of 64, without double quantization) or 8 bits (a scale for each row)."""

    def __init__(self, module: Any, bits: int, product_type: torch.dtype) -> None:
        columns, rows = module.weight.shape if type(module).__name__ == "Conv1D" else reversed(module.weight.shape)
        super().__init__(columns, rows, bias=False, device="meta")
        sizes, kind = ((rows, columns), torch.int8) if bits == 8 else ((-(-rows * columns // 2), 1), torch.uint8)
        packed = torch.empty(sizes, dtype=kind, device="meta")
        scales = torch.empty(rows if bits == 8 else -(-rows * columns // 64), dtype=torch.float32, device="meta")
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)
        if module.bias is not None:
            self.bias = torch.nn.Parameter(module.bias.to(product_type), requires_grad=False)
        self.bits, self.product_type = bits, product_type

    def dequantized_stand_in(self, product_type: torch.dtype) -> torch.Tensor:
        return torch.empty(self.out_features, self.in_features, dtype=product_type)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the product, as PEFT's adapters take it: that of 4 bits is copied once more."""
        if self.bits == 8:
            return _Product8bit.apply(inputs, self)
        return _Product4bit.apply(inputs.to(self.product_type), self).to(inputs.dtype).clone()


def quantize(model: Any, bits: int, product_type: torch.dtype, skipped: Sequence[str] | None) -> None:
    """Replace the matrices of a model that transformers quantizes with bitsandbytes, and freeze all others.

    ``skipped`` is ``llm_int8_skip_modules`` of the config; None: the head, and modules with tied weights.
    """
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    left_out = HfQuantizer.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
    for name, module in list(model.named_modules()):
        is_matrix = type(module) is torch.nn.Linear or type(module).__name__ == "Conv1D"
        if is_matrix and should_convert_module(name, left_out):
            model.set_submodule(name, QuantizedLinear(module, bits, product_type))
    model.requires_grad_(False)
