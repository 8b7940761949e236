"""Build the model of a config on the meta device with transformers, and count its parameters.

A process of its own, started by `model_count`: config.json on stdin, a JSON object on stdout.  No weights are
allocated, nothing is downloaded, and no code of a model's repository is run: the class is the one of transformers that
the config names in ``architectures``.  `effllm.memory.measure_child` is such a process, too.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from effllm.config.isolated import NoAnswer, answer
from effllm.memory.config_fields import architecture_of
from effllm.memory.model import ATTENTION, EMBEDDING, EXPERT, HEAD, MLP, NORM, ROUTER, SHARED, ParameterTensor

#: Names of the experts that compute a token, in the configs of transformers 5.23.
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "experts_per_token")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_QKV = ("q", "k", "v")


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
                group = HEAD if module is head else _group(path, type(module).__name__)
                yield _tensor(group, path, leaf, tuple(parameter.shape))


def _group(path: str, kind: str) -> str:
    leaf = path.rsplit(".", 1)[-1]
    if kind == "Embedding":
        return EMBEDDING
    if "norm" in kind.lower() or leaf.endswith("norm"):
        return NORM
    if "shared_expert" in path:
        return SHARED
    if "experts" in path:
        return EXPERT
    if leaf in ("gate", "router") or "router" in path:
        return ROUTER
    return ATTENTION if any(word in path for word in ("attn", "attention", "mixer", "mamba")) else MLP


def _tensor(group: str, path: str, leaf: str, sizes: tuple[int, ...]) -> ParameterTensor:
    """Return a tensor: the experts of a layer are one tensor of three dimensions, or of two for their biases."""
    is_bias = leaf.endswith("bias")
    count = 1
    if group == EXPERT and len(sizes) == 3 - is_bias:
        count, *rest = sizes
        sizes = tuple(rest)
    rows, columns = (sizes[0] if sizes else 1), (math.prod(sizes[1:]) if len(sizes) > 1 else 0)
    if is_bias:
        name = "bias"
    elif group in (ATTENTION, MLP, EXPERT, SHARED) and columns:
        name = _name_of_matrix(path.rsplit(".", 1)[-1]) if group == ATTENTION else "mlp"
    else:
        name = ""
    return ParameterTensor(group, name, rows, columns, count)


def _name_of_matrix(leaf: str) -> str:
    """Return the name by which LoRA chooses a matrix of an attention."""
    if leaf.startswith("kv_b"):
        return "v"
    first = leaf.removeprefix("c_")[:1]
    return first if first in _QKV else "q" if leaf in ("c_attn", "W_pack") else "o"
