"""Measure a training step with fake tensors: torch's memory tracker, without a GPU and without weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from effllm.memory.plan import MemoryPlan

_ONE_RANK: dict[str, Any] = dict.fromkeys(("tp", "pp", "cp", "ep", "dp"), 1)
_OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")  # Adafactor of torch reads values, which fake tensors do not have
_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed")


class CannotMeasure(ValueError):
    """A plan or an environment in which a step cannot be measured, with the reason."""


def measure(config: Mapping[str, Any] | None, plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of the parts at the peak of two steps, and ``peak``.

    The model of transformers, with the adapters of PEFT, is built from its config on the meta device, and trained for
    two steps under FakeTensorMode: no memory is allocated.  ``torch.distributed._tools.mem_tracker`` counts the
    storages.

    Raises:
        CannotMeasure: the packages are missing, or the plan needs more than one rank or another trainer.
    """
    _check(config, plan)
    assert config is not None
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed._tools.mem_tracker import MemTracker
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise CannotMeasure(f"--measure needs torch and transformers: {error}") from None
    fields = {key: value for key, value in config.items() if key != "model_type"}
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # the error of an operation is raised as well
    try:
        built = AutoConfig.for_model(config["model_type"], **{**fields, "use_cache": False})
        with torch.device("meta"):
            attention = "eager" if plan.attention == "eager" else "sdpa"
            model = AutoModelForCausalLM.from_config(built, attn_implementation=attention)
            model = _prepared(torch, model, plan)
        with FakeTensorMode():
            _make_fake(torch, model)
            tracker = MemTracker()
            _train(torch, model, plan, tracker)
    except ImportError as error:
        raise CannotMeasure(f"--measure with --lora needs PEFT: {error}") from None
    except Exception as error:  # noqa: BLE001 - data-dependent code has no fake tensors (pytorch/pytorch#126738)
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CannotMeasure(f"--measure: this model cannot be measured: {type(error).__name__}: {reason}") from None
    return _peak(tracker.get_tracker_snapshot("peak"), has_adapters=plan.lora_rank > 0)


def _check(config: Mapping[str, Any] | None, plan: MemoryPlan) -> None:
    if config is None or not config.get("model_type"):
        raise CannotMeasure("--measure needs a config of Hugging Face with a model_type")
    if plan != replace(plan, base_bits=0, fused_loss=False, implementation="transformers", **_ONE_RANK):
        raise CannotMeasure(
            "--measure is for one rank with the kernels of transformers: no layout, quantized base or fused loss"
        )
    if plan.checkpointing == "selective":
        raise CannotMeasure("--measure has the checkpointing none and full")
    if plan.optimizer not in _OPTIMIZERS or plan.precision not in _PRECISIONS:
        raise CannotMeasure(f"--measure has the optimizers {', '.join(_OPTIMIZERS)} and {', '.join(_PRECISIONS)}")


def _prepared(torch: Any, model: Any, plan: MemoryPlan) -> Any:
    """Return the model in the precision of its weights, with adapters and checkpointing."""
    if plan.numbers.weights == 2:
        model = model.to(_short(torch, plan))
    if plan.lora_rank:
        from peft import LoraConfig, get_peft_model

        names = [name for name, one in model.named_modules() if _is_adapted(name, type(one).__name__, plan)]
        model = get_peft_model(model, LoraConfig(r=plan.lora_rank, target_modules=names, lora_dropout=0.0))
    if plan.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if plan.lora_rank:
            model.enable_input_require_grads()
    model.train()
    return model


def _make_fake(torch: Any, model: Any) -> None:
    """Replace the tensors on the meta device by fake ones; a tied weight stays one tensor.

    Frozen weights become buffers, because the tracker registers a hook for the gradient of each parameter.
    """
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, one in [*module._parameters.items(), *module._buffers.items()]:
            if one is None:
                continue
            if id(one) not in made:
                fake = torch.empty(one.shape, dtype=one.dtype)
                made[id(one)] = torch.nn.Parameter(fake) if one.requires_grad else fake
            if one.requires_grad:
                module._parameters[name] = made[id(one)]
            else:
                module._parameters.pop(name, None)
                module._buffers[name] = made[id(one)]


def _is_adapted(name: str, kind: str, plan: MemoryPlan) -> bool:
    """Return whether the module with a name has an adapter: matrices of the layers, Conv1D is that of GPT-2."""
    leaf = name.rsplit(".", 1)[-1]
    if kind not in ("Linear", "Conv1D") or leaf in ("lm_head", "embed_out"):
        return False
    is_attention = "attn" in name or "attention" in name
    if plan.lora_targets == "qv":
        return is_attention and leaf in ("q_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
    return is_attention or plan.lora_targets == "all"


def _short(torch: Any, plan: MemoryPlan) -> Any:
    return torch.float16 if plan.precision.startswith("fp16") else torch.bfloat16


def _train(torch: Any, model: Any, plan: MemoryPlan, tracker: Any) -> None:
    build = {
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }
    optimizer = build[plan.optimizer]([one for one in model.parameters() if one.requires_grad])
    words = torch.ones(plan.micro_batch, plan.seq_length, dtype=torch.long)
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):
            for _ in range(plan.accumulation):
                tracker.reset_mod_stats()  # the tracker has one forward pass of each module at a time
                with torch.autocast("cpu", dtype=_short(torch, plan), enabled=plan.numbers.autocast):
                    loss = model(input_ids=words, labels=words).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _peak(snapshot: Mapping[Any, Mapping[Any, int]], *, has_adapters: bool) -> dict[str, int]:
    names = {"PARAM": "weights", "GRAD": "gradients", "OPT": "optimizer_states", "ACT": "activations"}
    if has_adapters:
        names["BUFFER"] = "weights"
    found = dict.fromkeys((*names.values(), "temporary", "peak"), 0)
    for kinds in snapshot.values():
        for kind, size in kinds.items():
            word = str(kind).rsplit(".", 1)[-1]
            found["peak" if word == "Total" else names.get(word, "temporary")] += size
    return found
