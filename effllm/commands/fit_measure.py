"""Measure a training step with fake tensors: torch's memory tracker, without a GPU and without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from effllm.memory.plan import MemoryPlan

_SINGLE: dict[str, Any] = {
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "dp": 1,
    "lora_rank": 0,
    "base_bits": 0,
    "implementation": "transformers",
}
_OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "adafactor")
_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed")


class CannotMeasure(ValueError):
    """A plan or an environment in which a step cannot be measured, with the reason."""


def measure(config: Mapping[str, Any] | None, plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of the parts at the peak of the second step, and ``peak``.

    The model of transformers is built from its config under FakeTensorMode, and trained for two steps; no memory is
    allocated.  ``torch.distributed._tools.mem_tracker`` counts the storages.

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
    try:
        built = AutoConfig.for_model(config["model_type"], **{**fields, "use_cache": False})
        with FakeTensorMode():
            model = AutoModelForCausalLM.from_config(built, attn_implementation="sdpa")
            tracker = MemTracker()
            _train(torch, model, plan, tracker)
    except Exception as error:  # noqa: BLE001 - data-dependent code has no fake tensors (pytorch/pytorch#126738)
        raise CannotMeasure(f"--measure: {type(error).__name__}: {str(error).splitlines()[0][:200]}") from None
    return _peak(tracker.get_tracker_snapshot("peak"))


def _check(config: Mapping[str, Any] | None, plan: MemoryPlan) -> None:
    if config is None or not config.get("model_type"):
        raise CannotMeasure("--measure needs a config of Hugging Face with a model_type")
    if replace(plan, **_SINGLE) != plan:
        raise CannotMeasure("--measure is for one rank without adapters: no layout, LoRA or quantized base")
    if plan.optimizer not in _OPTIMIZERS or plan.precision not in _PRECISIONS:
        raise CannotMeasure(f"--measure has the optimizers {', '.join(_OPTIMIZERS)} and {', '.join(_PRECISIONS)}")


def _train(torch: Any, model: Any, plan: MemoryPlan, tracker: Any) -> None:
    short = torch.float16 if plan.precision.startswith("fp16") else torch.bfloat16
    if plan.numbers.weights == 2:
        model = model.to(short)
    if plan.attention == "eager":
        model.set_attn_implementation("eager")
    if plan.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    build = {
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
        "sgd": torch.optim.SGD,
        "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }
    optimizer = build[plan.optimizer](model.parameters())
    words = torch.ones(plan.micro_batch, plan.seq_length, dtype=torch.long)
    tracker.track_external(model, optimizer)
    with tracker:
        for step in range(2):
            for _ in range(plan.accumulation):
                with torch.autocast("cpu", dtype=short, enabled=plan.numbers.autocast):
                    loss = model(input_ids=words, labels=words).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                tracker.reset_mod_stats()


def _peak(snapshot: Mapping[Any, Mapping[Any, int]]) -> dict[str, int]:
    names = {"PARAM": "weights", "GRAD": "gradients", "OPT": "optimizer_states", "ACT": "activations"}
    found = dict.fromkeys((*names.values(), "temporary", "peak"), 0)
    for kinds in snapshot.values():
        for kind, size in kinds.items():
            word = str(kind).rsplit(".", 1)[-1]
            found["peak" if word == "Total" else names.get(word, "temporary")] += size
    return found
