"""Build a configuration with transformers, PEFT and torch, and count its step on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.memory.configurations import Configuration
from benchmarks.memory.counted import Counted, count_step
from benchmarks.memory.on_gpu import RealSize


@dataclass
class Built:
    """A training that has made one step, so that the optimizer's states exist."""

    model: Any
    optimizer: Any
    losses: list[Callable[[], torch.Tensor]]  # of the micro-batches of a step
    texts: list[torch.Tensor]
    scales: list[torch.Tensor]  # of quantized weights

    def step(self) -> None:
        for loss in self.losses:
            loss().backward()
        self.optimizer.step()


TARGETS = {"qv": ["q_proj", "v_proj"], "attention": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def measure(configuration: Configuration) -> Counted:
    """Return the bytes of the second step."""
    torch.set_num_threads(1)
    built = build(configuration)
    return count_step(built.model, built.optimizer, built.losses, built.texts, built.scales)


def build(configuration: Configuration | RealSize, device: str = "cpu") -> Built:
    """Return a training after its first step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**configuration.fields)
    attention = "eager" if configuration.architecture == "gemma2" else configuration.attention  # it has no sdpa
    if configuration.checkpointing == "selective":
        attention = _recomputed_attention()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if configuration.precision == "bf16":
        model = model.to(torch.bfloat16)
    computed = torch.float32 if configuration.precision == "fp32" else torch.bfloat16
    scales = _quantize(model, computed) if configuration.base_bits else []
    if configuration.lora_rank:
        model = _with_adapters(model, configuration)
    if configuration.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if configuration.lora_rank:
            model.enable_input_require_grads()
    model.train()
    trained = [one for one in model.parameters() if one.requires_grad]
    if configuration.optimizer == "muon":
        optimizer: Any = _muon(model)
    else:
        optimizer = OPTIMIZERS[configuration.optimizer](trained)
    shape = (configuration.micro_batch, configuration.seq_length)
    texts = [torch.randint(1, configuration.vocab, shape, device=device) for _ in range(configuration.accumulation)]
    losses = [_loss(model, ids, configuration.precision == "bf16-mixed") for ids in texts]
    built = Built(model, optimizer, losses, texts, scales)
    built.step()
    return built


def _loss(model: Any, ids: torch.Tensor, autocast: bool) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=autocast):
            return model(input_ids=ids, labels=ids).loss

    return loss


def _recomputed_attention() -> str:
    """Register a model's eager attention, recomputed in the backward pass, and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def attention(module: Any, *tensors: Any, **settings: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return checkpoint(partial(eager, module, **settings), *tensors, use_reentrant=False)

    AttentionInterface.register("recomputed", attention)
    AttentionMaskInterface.register("recomputed", eager_mask)
    return "recomputed"


def _quantize(model: Any, computed: torch.dtype) -> list[torch.Tensor]:
    """Quantize the products of the layers to NF4 as transformers does it with bitsandbytes; return the scales."""
    import bitsandbytes

    scales = []
    for name, one in list(model.named_modules()):
        if isinstance(one, torch.nn.Linear) and name != "lm_head":
            changed = bitsandbytes.nn.Linear4bit(
                *(one.in_features, one.out_features, one.bias is not None),
                compute_dtype=computed, compress_statistics=False, quant_type="nf4",
            )  # fmt: skip
            changed.load_state_dict(one.state_dict())
            model.set_submodule(name, changed.to(one.weight.device))
            scales.append(changed.weight.quant_state.absmax)
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True
    return scales


def _with_adapters(model: Any, configuration: Configuration | RealSize) -> Any:
    from peft import LoraConfig, get_peft_model

    names = {name.split(".")[-1] for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    chosen = TARGETS.get(configuration.lora_targets, sorted(names - {"lm_head"}))
    return get_peft_model(model, LoraConfig(r=configuration.lora_rank, target_modules=chosen, lora_dropout=0.0))


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675): the sign of an average of momentum and gradient; torch has no Lion."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    state = self.state[one]
                    if not state:
                        state["momentum"] = torch.zeros_like(one)
                    update = (0.9 * state["momentum"] + 0.1 * one.grad).sign_()
                    one.add_(update, alpha=-group["lr"])
                    state["momentum"].mul_(0.99).add_(one.grad, alpha=0.01)


class MuonWithAdamW:
    """torch.optim.Muon for the matrices of layers, AdamW for all others: torch's Muon takes only matrices."""

    def __init__(self, trained: list[torch.nn.Parameter], first_and_last: set[int]) -> None:
        matrices = [one for one in trained if one.dim() == 2 and id(one) not in first_and_last]
        others = [one for one in trained if one.dim() != 2 or id(one) in first_and_last]
        self.parts = [torch.optim.Muon(matrices)] + ([torch.optim.AdamW(others)] if others else [])

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for part in self.parts for key, value in part.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()


def _adamw_8bit(trained: Any) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(trained)


def _muon(model: torch.nn.Module) -> MuonWithAdamW:
    outer = ("embed", "wte", "wpe", "lm_head")
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    ends = {id(one) for name, one in named.items() if any(word in name for word in outer) and "lora" not in name}
    return MuonWithAdamW(list(named.values()), ends)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda trained: torch.optim.AdamW(trained, fused=trained[0].is_cuda or None),  # as the Trainer does
    "sgd": lambda trained: torch.optim.SGD(trained, lr=0.1),
    "sgd-momentum": lambda trained: torch.optim.SGD(trained, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
    "adamw-8bit": _adamw_8bit,
}
