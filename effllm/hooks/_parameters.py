"""The number of parameters of a model (also if wrapped, sharded or quantised), and its FLOPs per token.

Every rank computes these numbers for the whole model, without communication: the shards of FSDP and ZeRO contain the
shape of the whole tensor.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WEIGHTS = (
    "FLOPs per token: 6 x multiplied weights, or 4 x frozen weights, which have no weight gradient; embedding lookups "
    "and inactive experts are left out; attention: "
)
CONVENTION = f"{_WEIGHTS}12 x layers x width x sequence length, without causality"

# Where a model has its config, and the usual names in it: transformers, GPT-2 and its kin, Llama's own code, timm.
_CONFIGS = ("config", "args", "cfg", "params")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim")
_VOCABULARIES = ("vocab_size", "n_vocab", "padded_vocab_size")
_MAX_TABLES = 3  # tokens, positions and segments; a model with more tables reads categories


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts of the whole model."""

    total: int
    trainable: int
    active: int | None  # parameters that one token uses; ``None`` if it uses all parameters, or if this is unknown
    active_trainable: int

    def share_of_rank(self, counts_them: bool) -> dict[str, int]:
        """Return a rank's part of the sum over all ranks: all parameters if the rank counts them, else 0."""
        if not counts_them:
            return {"total": 0, "trainable": 0, "active": 0}
        counts = {"total": self.total, "trainable": self.trainable}
        return counts if self.active is None else {**counts, "active": self.active}


def parameters_of(model: Any) -> Parameters:
    """Return the parameter counts of a model; it may be compiled, wrapped, sharded or quantised, and have adapters."""
    active_share = _active_share_of_experts(config_of(model))
    total = trainable = 0
    active = active_trainable = 0.0
    for name, count, is_trainable in each_parameter(model):
        share = active_share if active_share is not None and ".experts." in name else 1.0
        total, active = total + count, active + count * share
        if is_trainable:
            trainable, active_trainable = trainable + count, active_trainable + count * share
    return Parameters(total, trainable, None if active_share is None else round(active), round(active_trainable))


def each_parameter(model: Any) -> Iterator[tuple[str, int, bool]]:
    """Yield each parameter of the whole model once, as (name, number of elements, is_trained)."""
    flats = _flat_parameters(model)
    original_ids = {id(original) for flat in flats.values() for original in getattr(flat, "_params", None) or ()}
    for name, parameter in model.named_parameters():  # tied parameters are listed once
        if id(parameter) not in original_ids and id(parameter) not in flats:  # those of FSDP1 follow, with whole shapes
            yield name, num_elements_of(parameter), bool(parameter.requires_grad)
    for flat in flats.values():
        originals = getattr(flat, "_params", None) or [flat] * len(flat._shapes)
        for name, shape, original in zip(flat._fqns, flat._shapes, originals, strict=True):
            yield f".{name}", shape.numel(), bool(original.requires_grad)


def num_elements_of(parameter: Any) -> int:
    """Return the number of elements of a whole parameter, even if this rank has only a shard."""
    num_whole = getattr(parameter, "ds_numel", None)  # under ZeRO-3 the parameter itself is an empty tensor
    if num_whole is not None:
        return int(num_whole)
    if type(parameter).__name__ == "Params4bit":
        shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
        if shape is not None:
            return int(shape.numel())
        if getattr(parameter, "bnb_quantized", not parameter.is_floating_point()):
            return int(parameter.numel()) * 2 * int(parameter.element_size())  # 4 bits: two elements per byte
    return int(parameter.numel())  # for a DTensor this is the size of the whole tensor


def _flat_parameters(model: Any) -> dict[int, Any]:
    """Return the flat parameters of FSDP1; they contain the shapes of the original parameters."""
    flats: dict[int, Any] = {}
    for module in model.modules():
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is not None and hasattr(flat, "_shapes"):
            flats[id(flat)] = flat
    return flats


def config_of(model: Any) -> Any:  # of a multimodal model, the config of its text part
    inner = unwrapped(model)
    config = next((member for name in _CONFIGS if (member := getattr(inner, name, None)) is not None), None)
    return getattr(config, "text_config", None) or config


def model_of(parameters: Sequence[Any]) -> Any:
    """Return the innermost module with all of these parameters, of all modules in memory; ``None`` without one.

    For a module that FSDP1 has wrapped, this is the wrapper, which has the shapes of the whole parameters.  A process
    with a million Python objects needs about 0.1 s, so this is called once in a training.
    """
    module_class, ids = sys.modules["torch"].nn.Module, {id(parameter) for parameter in parameters}
    modules = [obj for obj in gc.get_objects() if issubclass(type(obj), module_class)]  # isinstance runs a proxy's code
    layers = (module for module in modules if ids & {id(own) for own in vars(module).get("_parameters", {}).values()})
    model = next(layers, None)  # the search goes from a layer with some of the parameters to the modules around it
    while model is not None and not ids <= {id(parameter) for parameter in model.parameters()}:
        model = next((module for module in modules if any(child is model for child in module.children())), None)
    inner_modules = ((module, vars(module).get("_modules", {}).get("_fsdp_wrapped_module")) for module in modules)
    return next((wrapper for wrapper, inner in inner_modules if inner is not None and inner is model), model)


def vocabulary_size_of(model: Any) -> int | None:
    """Return the number of ids in the vocabulary of a language model; ``None`` for other models.

    A language model has few embeddings; one has as many rows as the config states, or as the last layer has outputs.
    """
    rows = [module.num_embeddings for module in model.modules() if _is_lookup_table(module)]
    outputs = [width for module in model.modules() if isinstance(width := getattr(module, "out_features", None), int)]
    num_ids = {_first_count(config_of(model), _VOCABULARIES), *outputs[-1:]}
    return max((count for count in rows if count in num_ids), default=None) if len(rows) <= _MAX_TABLES else None


def convention_of(model: Any) -> str:
    """Return the convention of `flops_per_token` for a model."""
    config = config_of(model)
    has_shape = _first_count(config, _LAYERS) and _attention_width(config)
    return CONVENTION if has_shape else f"{_WEIGHTS}left out, because the model has no config with layers and width"


def _is_lookup_table(module: Any) -> bool:
    return hasattr(module, "num_embeddings") and hasattr(module, "embedding_dim")


def _first_count(config: Any, names: Sequence[str]) -> int | None:
    """Return the first number above 0 with one of these names, of an object or a dictionary."""
    values = (config.get(name) if isinstance(config, Mapping) else getattr(config, name, None) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def model_name(model: Any) -> str:
    """Return the name under which transformers has loaded the model, without its folder, or the name of its class."""
    inner = unwrapped(model)
    try:
        name = getattr(getattr(inner, "config", None), "_name_or_path", None)
    except Exception:  # noqa: BLE001 - any object can be named ``config``
        name = None
    if not isinstance(name, str) or not name.strip("/. "):
        return type(inner).__name__
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", ".")) or name.count("/") > 1 else name


def unwrapped(model: Any) -> Any:
    """Return the model inside of DDP, FSDP, DeepSpeed and torch.compile."""
    for _ in range(8):  # at most so many wrappers
        inner = getattr(model, "_orig_mod", None) or getattr(model, "_fsdp_wrapped_module", None)
        if inner is None and not hasattr(model, "config"):
            inner = getattr(model, "module", None)
        if inner is None:
            return model
        model = inner
    return model


def _active_share_of_experts(config: Any) -> float | None:
    """Return the share of the experts that a token uses; ``None`` if it uses all, or without experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((count for name in names if (count := getattr(config, name, None))), None)
    num_active = getattr(config, "num_experts_per_tok", None)
    return num_active / num_experts if num_experts and num_active and num_active < num_experts else None


def flops_per_token(model: Any, counted: Parameters, sequence_length: int | None) -> tuple[float, float] | None:
    """Return the FLOPs of a token, in total and of the forward pass; ``None`` if unknown.

    They follow `convention_of`, for a model with layers of one width.  Without ``sequence_length``, the number of
    positions to which a token attends, attention is not counted.
    """
    config = config_of(model)
    layers, width = _first_count(config, _LAYERS) or 0, _attention_width(config) or 0
    if (not (layers and width) and vocabulary_size_of(model) is None) or getattr(config, "is_encoder_decoder", False):
        return None
    looked_up, looked_up_trainable = _num_looked_up(model, config)
    active = (counted.total if counted.active is None else counted.active) - looked_up
    trained = counted.active_trainable - looked_up_trainable
    attention = 4 * layers * width * (sequence_length or 0)  # forward; backward is twice as much
    # Per weight: 2 FLOPs forward, 2 for the gradient of its input, and 2 for its own gradient if it is trained.
    return float(4 * active + 2 * trained + 3 * attention), float(2 * active + attention)


class FlopsByWidth:
    """The FLOPs of a token if batches are padded to different widths: attention needs more FLOPs at a larger width.

    Args:
        at_zero: FLOPs of a token at a width of 0, in total and forward, from `flops_per_token`.
        at_width: FLOPs of a token at ``width``, in total and forward.
        width: the width of the first batch.
    """

    def __init__(
        self, at_zero: tuple[float, float] = (0.0, 0.0), at_width: tuple[float, float] = (0.0, 0.0), width: int = 0
    ) -> None:
        self._at_zero = at_zero
        self._width: float = width  # the last reported width
        self._slopes: tuple[float, ...] = (  # of a token, for each position of width, in total and forward
            tuple((flops - zero) / width for zero, flops in zip(at_zero, at_width, strict=True)) if width else ()
        )
        self._tokens = self._tokens_times_width = 0  # sums over the batches

    def add_tokens(self, tokens: int, tokens_times_width: int) -> None:
        self._tokens += tokens
        self._tokens_times_width += tokens_times_width

    @property
    def mean_width(self) -> float:
        """The mean width of the batches, weighted by their tokens."""
        return self._tokens_times_width / self._tokens if self._tokens else 0.0

    def has_changed(self, tolerance: float) -> bool:
        """Whether the mean width differs from the last reported width by more than the share ``tolerance``."""
        return bool(self._slopes and self._tokens_times_width) and abs(self.mean_width / self._width - 1) > tolerance

    def report_width(self, width: float) -> tuple[float, float]:
        """Return the FLOPs of a token at this width, in total and forward; it is the reported width from now on."""
        self._width = width
        return self._at_zero[0] + self._slopes[0] * width, self._at_zero[1] + self._slopes[1] * width


def _attention_width(config: Any) -> int | None:  # of all heads, which may differ from the model's width
    num_heads, head_width = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    if num_heads and head_width:
        return int(num_heads) * int(head_width)
    return _first_count(config, _WIDTHS)


def _num_looked_up(model: Any, config: Any) -> tuple[int, int]:
    """Return the number of elements in lookup tables, in total and trained; a lookup has no multiplication."""
    inner = unwrapped(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    is_tied = bool(getattr(config, "tie_word_embeddings", False)) and head is not None
    tied = inner.get_input_embeddings() if is_tied and hasattr(inner, "get_input_embeddings") else None
    total = trainable = 0
    layers = [module for module in model.modules() if hasattr(module, "out_features") and hasattr(module, "weight")]
    multiplied = {id(layer.weight) for layer in layers}  # the output layer multiplies the weights of a tied table
    for module in model.modules():
        if _is_lookup_table(module) and module is not tied and id(getattr(module, "weight", None)) not in multiplied:
            count = int(module.num_embeddings) * int(module.embedding_dim)
            total += count
            weight = getattr(module, "weight", None)
            trainable += count if weight is not None and weight.requires_grad else 0
    return total, trainable
