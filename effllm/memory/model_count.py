"""The parameters of a model, counted in the model that transformers builds from its config on the meta device.

A process of its own builds it: config.json on stdin, a JSON object on stdout.  No weights are allocated, nothing is
downloaded, and no code of a model's repository is run: the class is the one of transformers that the config names in
``architectures``.  `effllm.memory.measure_child` is such a process, too.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from effllm.config.isolated import NoAnswer, answer, ask
from effllm.memory.architectures import ALIASES, architecture_of, configs
from effllm.memory.config_json import ONLY_TEXT
from effllm.memory.model import MAX_LAYERS, Experts, Group, ModelShape, ParameterTensor, WrongModel
from effllm.memory.states import count_parameters

DEADLINE_S = 120.0  # the import of torch and transformers takes 3 to 10 s, the largest models 3 s more
#: Fields of a config that name layers which transformers does not build: predictions of further tokens (MTP).
LEFT_OUT = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")

#: Names of the experts that compute a token, in the configs of transformers 5.23.
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "experts_per_token")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_QKV = ("q", "k", "v")


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
    reply = ask("effllm.memory.model_count", "build", fields, DEADLINE_S)
    tensors = tuple(ParameterTensor(*row) for row in reply["tensors"])
    notes = (f"parameters counted in {named} of transformers {reply['version']}", *_left_out(fields))
    experts = _experts(tensors, reply["active_experts"], reply["experts"])
    return _unknown_layers(name, named, tensors, notes, *reply["sizes"], experts=experts)


def stated_model(name: str, architecture: str, parameters: int, active: int | None) -> ModelShape:
    """Return the shape of a model of which only the number of parameters is known.

    Raises:
        WrongModel: more parameters are active than there are.
    """
    if active is not None and active > parameters:
        raise WrongModel(f"{active:,} of {parameters:,} parameters are active")
    tensors = (ParameterTensor(Group.MLP, "", parameters, 0, 1),)
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
    has_experts = any(tensor.group == Group.EXPERT for tensor in tensors)
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


# --- in the process of its own ---


def main(_arguments: Sequence[str]) -> None:
    """Answer `model_count`."""
    answer(count)


def build_model(fields: Mapping[str, Any], **settings: Any) -> Any:
    """Return a model on the meta device: the class in ``architectures``, or the causal one of ``model_type``.

    Raises:
        NoAnswer: transformers has no such class.
    """
    import torch
    import transformers

    named = architecture_of(fields)
    if not named:
        configs, models = transformers.CONFIG_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = fields.get("model_type")
        build: Any = models.get(configs[kind], None) if kind in configs else None
    else:
        build = getattr(transformers, named, None)
    if not (isinstance(build, type) and issubclass(build, transformers.PreTrainedModel)):
        wanted = named or f"of the model_type {fields.get('model_type')}"
        raise NoAnswer(f"transformers {transformers.__version__} has no model {wanted}")
    # transformers 5 writes an infinity as {"__float__": "Infinity"}.
    stated = json.loads(json.dumps(fields), object_hook=lambda value: float(value.get("__float__", 0)) or value)
    config = build.config_class.from_dict(stated)  # type: ignore[attr-defined]
    with torch.device("meta"):
        return build._from_config(config, **{"dtype": torch.float32, **settings})  # type: ignore[attr-defined]


def count(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model by kind, and the sizes that its config states.

    Raises:
        NoAnswer: transformers has no such class.
    """
    import transformers

    model = build_model(fields)
    inner = model.config.get_text_config()

    def stated(*names: str) -> int | None:
        return next((value for name in names if isinstance(value := getattr(inner, name, None), int)), None)

    sizes = [max(stated(name) or 1, 1) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")]
    tensors = Counter(tensors_of(model))
    rows = [[kind.group, kind.name, kind.rows, kind.columns, kind.count * times] for kind, times in tensors.items()]
    experts = {"active_experts": stated(*ACTIVE), "experts": stated(*EXPERTS)}
    return {"version": transformers.__version__, **experts, "sizes": sizes, "tensors": rows}


def tensors_of(model: Any) -> Iterator[ParameterTensor]:
    """Yield the tensors of a model by kind; a tensor that several modules share is one."""
    head = model.get_output_embeddings()
    seen: set[int] = set()
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                group = Group.HEAD if module is head else _group(path, type(module).__name__)
                yield _tensor(group, path, leaf, tuple(parameter.shape))


def _group(path: str, kind: str) -> str:
    leaf = path.rsplit(".", 1)[-1]
    if kind == "Embedding":
        return Group.EMBEDDING
    if "norm" in kind.lower() or leaf.endswith("norm"):
        return Group.NORM
    if "shared_expert" in path:
        return Group.SHARED
    if "experts" in path:
        return Group.EXPERT
    if leaf in ("gate", "router") or "router" in path:
        return Group.ROUTER
    return Group.ATTENTION if any(word in path for word in ("attn", "attention", "mixer", "mamba")) else Group.MLP


def _tensor(group: str, path: str, leaf: str, sizes: tuple[int, ...]) -> ParameterTensor:
    """Return a tensor: the experts of a layer are one tensor of three dimensions, or of two for their biases."""
    is_bias = leaf.endswith("bias")
    count = 1
    if group == Group.EXPERT and len(sizes) == 3 - is_bias:
        count, *rest = sizes
        sizes = tuple(rest)
    rows, columns = (sizes[0] if sizes else 1), (math.prod(sizes[1:]) if len(sizes) > 1 else 0)
    if is_bias:
        name = "bias"
    elif group in (Group.ATTENTION, Group.MLP, Group.EXPERT, Group.SHARED) and columns:
        name = _name_of_matrix(path.rsplit(".", 1)[-1]) if group == Group.ATTENTION else "mlp"
    else:
        name = ""
    return ParameterTensor(group, name, rows, columns, count)


def _name_of_matrix(leaf: str) -> str:
    """Return the name by which LoRA chooses a matrix of an attention."""
    if leaf.startswith("kv_b"):
        return "v"
    first = leaf.removeprefix("c_")[:1]
    return first if first in _QKV else "q" if leaf in ("c_attn", "W_pack") else "o"
