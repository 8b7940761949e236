"""The parameters of a model, counted in the model that transformers builds from its config on the meta device.

A process of its own builds it: config.json on stdin, a JSON object on stdout.  No weights are allocated, nothing is
downloaded, and no code of a model's repository is run: the class is one of transformers.
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
from effllm.memory.config_json import ONLY_TEXT, architecture_of, configs, field_names
from effllm.memory.plan import MAX_LAYERS, Experts, Group, ModelShape, ParameterTensor, WrongModel
from effllm.memory.states import count_parameters

DEADLINE_S = 120.0  # the import of torch and transformers takes 3 to 10 s, the largest models 3 s more


def can_count() -> bool:
    """Return whether torch and transformers are installed, without importing them."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def count_model(fields: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a model whose layers are unknown, with the tensors that were counted."""
    if not (named := architecture_of(fields)):
        raise NoAnswer("the config has no architectures, which name the class of the model")
    stated = {key: value for config in configs(fields) for key, value in config.items()}
    for key in field_names("layers"):
        if isinstance(stated.get(key), (int, float)) and stated[key] > MAX_LAYERS:
            raise WrongModel(f"{key} is {stated[key]}: a number from 1 to {MAX_LAYERS:,} is possible")
    reply = ask("effllm.memory.model_count", "build", fields, DEADLINE_S)
    not_built = [key for key in field_names("not_built") if stated.get(key)]
    left_out = [f"{key} is {stated[key]}: transformers builds no such layers" for key in not_built]
    attributes = _UNKNOWN | {
        **reply["sizes"],
        "tensors": tuple(ParameterTensor(*row) for row in reply["tensors"]),
        "notes": (f"parameters counted in {named} of transformers {reply['version']}", *left_out),
        "experts": Experts(**reply["experts"], intermediate=1, layers=1) if reply["experts"] else None,
    }
    return ModelShape(name, named, **attributes)


_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")  # 1 without formulas
_UNKNOWN: dict[str, Any] = {**dict.fromkeys(_SIZES, 1), "tied": True, "has_known_layers": False}


def stated_model(name: str, architecture: str, parameters: int, active: int | None) -> ModelShape:
    """Return the shape of a model of which only the number of parameters is known."""
    if active is not None and active > parameters:
        raise WrongModel(f"{active:,} of {parameters:,} parameters are active")
    notes = ("only the number of parameters is known: as vectors, without matrices for Adafactor, Muon or LoRA",)
    tensors = (ParameterTensor(Group.MLP, "", parameters, 0, 1),)
    attributes = _UNKNOWN | {"tensors": tensors, "notes": notes, "active_parameters": active}
    return ModelShape(name, architecture or "this model", **attributes)


def with_counted(model: ModelShape, counted: ModelShape) -> ModelShape:
    """Return the shape of a known architecture; if the count of parameters differs, it has the counted tensors."""
    totals = [count_parameters(shape).total for shape in (model, counted)]
    if totals[0] == totals[1]:
        return replace(model, notes=(*model.notes, *counted.notes))
    notes = [note for note in model.notes if not note.startswith(ONLY_TEXT)]
    other_total = f"the formulas of {model.architecture} give {totals[0]:,}"
    tied = all(tensor.group != Group.HEAD for tensor in counted.tensors)
    return replace(model, tensors=counted.tensors, tied=tied, notes=(*notes, *counted.notes, other_total))


# --- in the process of its own ---


def main(_arguments: Sequence[str]) -> None:
    answer(count)


def build_model(fields: Mapping[str, Any], **settings: Any) -> Any:
    """Return a model on the meta device: the class in ``architectures``, or the causal one of ``model_type``."""
    import torch
    import transformers

    name = architecture_of(fields)
    kind, types, model_class = fields.get("model_type"), transformers.CONFIG_MAPPING, getattr(transformers, name, None)
    if not name and kind in types:
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(types[kind], None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise NoAnswer(f"transformers {transformers.__version__} has no model {name or f'of the model_type {kind}'}")
    # transformers 5 writes an infinity as {"__float__": "Infinity"}.
    stated = json.loads(json.dumps(fields), object_hook=lambda value: float(value.get("__float__", 0)) or value)
    config = model_class.config_class.from_dict(stated)  # type: ignore[attr-defined]
    with torch.device("meta"):
        return model_class._from_config(config, **{"dtype": torch.float32, **settings})  # type: ignore[attr-defined]


def count(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model by kind, and the sizes that its config states."""
    import transformers

    model = build_model(fields)
    inner = model.config.get_text_config()

    def stated(*names: str) -> int:
        return next((value for name in names if isinstance(value := getattr(inner, name, None), int)), 0)

    sizes = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    tensors = Counter(tensors_of(model))
    rows = [[kind.group, kind.name, kind.rows, kind.columns, kind.count * times] for kind, times in tensors.items()]
    experts = {"total": stated(*field_names("experts")), "active": stated(*field_names("active_experts"))}
    has_experts = any(kind.group == Group.EXPERT for kind in tensors) and 1 <= experts["active"] <= experts["total"]
    return {
        "version": transformers.__version__,
        "experts": experts if has_experts else None,
        "sizes": {size: max(stated(name), 1) for size, name in sizes.items()},
        "tensors": rows,
    }


def tensors_of(model: Any) -> Iterator[ParameterTensor]:
    """Yield the tensors of a model; a tensor that several modules share occurs once."""
    head = model.get_output_embeddings()
    yielded_ids: set[int] = set()
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in yielded_ids:
                yielded_ids.add(id(parameter))
                group = Group.HEAD if module is head else _group_of(path, type(module).__name__)
                yield _tensor_of(group, path, leaf, tuple(parameter.shape))


def _group_of(path: str, class_name: str) -> str:
    module_name = path.rsplit(".", 1)[-1]
    if class_name == "Embedding":
        return Group.EMBEDDING
    if "norm" in class_name.lower() or module_name.endswith("norm"):
        return Group.NORM
    if "experts" in path or "shared_expert" in path:
        return Group.SHARED if "shared_expert" in path else Group.EXPERT
    if module_name in ("gate", "router") or "router" in path:
        return Group.ROUTER
    return Group.ATTENTION if any(word in path for word in ("attn", "attention", "mixer", "mamba")) else Group.MLP


def _tensor_of(group: str, path: str, leaf: str, sizes: tuple[int, ...]) -> ParameterTensor:
    """Return a tensor: the experts of a layer are one tensor of three dimensions, or of two for their biases."""
    is_bias, count = leaf.endswith("bias"), 1
    if group == Group.EXPERT and len(sizes) == 3 - is_bias:
        count, *rest = sizes
        sizes = tuple(rest)
    rows, columns = (sizes[0] if sizes else 1), (math.prod(sizes[1:]) if len(sizes) > 1 else 0)
    matrix, name = path.rsplit(".", 1)[-1], "bias" if is_bias else ""
    if columns and not is_bias and group in (Group.MLP, Group.EXPERT, Group.SHARED):
        name = "mlp"
    elif columns and not is_bias and group == Group.ATTENTION:  # the name by which LoRA chooses a matrix
        letter = matrix.removeprefix("c_")[:1]
        is_qkv = matrix in ("c_attn", "W_pack")
        name = "v" if matrix.startswith("kv_b") else letter if letter in ("q", "k", "v") else "q" if is_qkv else "o"
    return ParameterTensor(group, name, rows, columns, count)
