"""The parameters of a model, counted in the model that transformers builds from its config."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from effllm.config.isolated import NoAnswer, ask
from effllm.memory.config_fields import ALIASES, architecture_of, configs
from effllm.memory.config_json import ONLY_TEXT
from effllm.memory.model import EXPERT, MAX_LAYERS, MLP, Experts, ModelShape, ParameterTensor, WrongModel
from effllm.memory.states import count_parameters

DEADLINE_S = 120.0  # the import of torch and transformers takes 3 to 10 s, the largest models 3 s more
#: Fields of a config that name layers which transformers does not build: predictions of further tokens (MTP).
LEFT_OUT = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")


def can_count() -> bool:
    """Return whether torch and transformers are installed, without importing them."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def count_model(fields: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a model whose layers are unknown, with the tensors that were counted.

    Raises:
        NoAnswer: the class is not named, or transformers cannot build it.
        WrongModel: sizes are impossible.
    """
    named = architecture_of(fields)
    if not named:
        raise NoAnswer("the config has no architectures, which name the class of the model")
    _check(fields)
    answer = ask("effllm.memory.count_child", "build", fields, DEADLINE_S)
    tensors = tuple(ParameterTensor(*row) for row in answer["tensors"])
    notes = (f"parameters counted in {named} of transformers {answer['version']}", *_left_out(fields))
    experts = _experts(tensors, answer["active_experts"], answer["experts"])
    return _unknown_layers(name, named, tensors, notes, *answer["sizes"], experts=experts)


def stated_model(name: str, architecture: str, parameters: int, active: int | None) -> ModelShape:
    """Return the shape of a model of which only the number of parameters is known.

    Raises:
        WrongModel: more parameters are active than there are.
    """
    if active is not None and active > parameters:
        raise WrongModel(f"{active:,} of {parameters:,} parameters are active")
    tensors = (ParameterTensor(MLP, "", parameters, 0, 1),)
    notes = ("only the number of parameters is known: as vectors, without matrices for Adafactor, Muon or LoRA",)
    return _unknown_layers(name, architecture or "this model", tensors, notes, active_parameters=active)


def with_counted(model: ModelShape, counted: ModelShape) -> ModelShape:
    """Return the shape of a known architecture; with another number of parameters, the counted tensors are used."""
    totals = [count_parameters(shape).total for shape in (model, counted)]
    if totals[0] == totals[1]:
        return replace(model, notes=(*model.notes, *counted.notes))
    notes = [note for note in model.notes if not note.startswith(ONLY_TEXT)]
    more = f"the formulas of {model.architecture} give {totals[0]:,}"
    return replace(model, tensors=counted.tensors, notes=(*notes, *counted.notes, more))


def _experts(tensors: tuple[ParameterTensor, ...], active: int | None, total: int | None) -> Experts | None:
    has_experts = any(tensor.group == EXPERT for tensor in tensors)
    if not has_experts or active is None or total is None or not 1 <= active <= total:
        return None
    return Experts(total=total, active=active, intermediate=1, layers=1)


def _unknown_layers(
    name: str,
    architecture: str,
    tensors: tuple[ParameterTensor, ...],
    notes: tuple[str, ...],
    layers: int = 1,
    hidden: int = 1,
    heads: int = 1,
    **attributes: Any,
) -> ModelShape:
    attributes |= {"tied": True, "tensors": tensors, "notes": notes, "has_known_layers": False}
    return ModelShape(name, architecture, layers, hidden, heads, 1, 1, 1, 1, **attributes)


def _left_out(fields: Mapping[str, Any]) -> list[str]:
    stated = {name: value for config in configs(fields) for name, value in config.items()}
    return [f"{name} is {stated[name]}: transformers builds no such layers" for name in LEFT_OUT if stated.get(name)]


def _check(fields: Mapping[str, Any]) -> None:
    """Refuse numbers of layers with which a model would not be built in any time."""
    for config in configs(fields):
        for name in ALIASES["layers"]:
            value = config.get(name)
            if isinstance(value, (int, float)) and value > MAX_LAYERS:
                raise WrongModel(f"{name} is {value}: a number from 1 to {MAX_LAYERS:,} is possible")
