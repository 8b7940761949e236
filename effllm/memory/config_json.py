"""The shape of a model, from the fields of a Hugging Face config.json or from a row of known_models.json.

The sizes follow the modules of transformers, whose parameters tests compare, with the table architectures.toml.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from effllm.memory.plan import MAX_LAYERS, MAX_SIZE, Experts, LatentAttention, ModelShape, WrongModel

Fields = Mapping[str, Any]
ONLY_TEXT = "only the text model"  # beginning of a note


class UnknownArchitecture(WrongModel):
    """A config whose architecture has no formulas here."""


def text(fields: Fields, key: str) -> str:
    value = fields.get(key)
    return value if isinstance(value, str) else ""


def architecture_of(fields: Fields) -> str:
    names = fields.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def configs(fields: Fields) -> list[Fields]:
    """Return the config of the text model, if there is one, and the whole config."""
    inner = fields.get("text_config")
    return [inner, fields] if isinstance(inner, Mapping) else [fields]


def as_json(value: Any) -> str:
    return json.dumps(value)[:60]


def number_in(fields: Fields, key: str, default: int | None = None) -> int:
    """Return a field that is a whole number within its limits; `WrongModel` for another value, or without any."""
    value = fields.get(key)
    if value is None:
        if default is None:
            raise WrongModel(f"{key} is null" if key in fields else f"the config has no {key}")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        raise UnknownArchitecture(f"{key} is {as_json(value)}: {_NO_SIZES}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongModel(f"{key} is {as_json(value)}, not a whole number")
    lowest = 0 if key in field_names("may_be_zero") else 1
    limit = MAX_LAYERS if key in field_names("layers") else MAX_SIZE
    if not lowest <= value <= limit:
        raise WrongModel(f"{key} is {as_json(fields[key])}: a number from {lowest} to {limit:,} is possible")
    return value


def size_in(fields: Fields, kind: str, default: int | None = None) -> int:
    """Return a size, such as "hidden", whose field has other names in other architectures (`field_names`)."""
    stated = [key for key in field_names(kind) if key in fields]
    key = next((key for key in stated if fields[key] is not None), stated[0] if stated else field_names(kind)[0])
    return number_in(fields, key, default)


def flag(fields: Fields, key: str, default: bool) -> bool:
    value = fields.get(key)
    if value not in (None, True, False):
        raise WrongModel(f"{key} is {as_json(value)}, not true or false")
    return default if value is None else bool(value)


def read_config(fields: Fields, name: str = "") -> ModelShape:
    """Return the shape of the model that a config.json describes."""
    quantized = [config for part in configs(fields) if isinstance(config := part.get("quantization_config"), Mapping)]
    notes = [
        f"the weights are quantized ({text(config, 'quant_method') or 'an unknown method'}), which is not read: the "
        "estimate is without it; --base-bits 4 or 8 estimates quantized matrices, for a training together with --lora"
        for config in quantized[-1:]
    ]
    if other := [key for key in ("vision_config", "audio_config") if key in fields]:
        notes.append(f"{ONLY_TEXT}: the parameters of {' and '.join(other)} are not counted")
    if "dim" in fields and "n_layers" in fields:
        fields = _mistral_fields(fields)
    inner = fields.get("text_config")
    if isinstance(inner, Mapping) and not any(key in fields for key in field_names("layers")):
        fields = _text_model_fields(inner, fields, notes)
    key = "model_type" if text(fields, "model_type") else "architectures"
    architecture = text(fields, "model_type") or architecture_of(fields)
    if not architecture:
        kind = f"model_type is {as_json(fields['model_type'])}" if "model_type" in fields else "there is no model_type"
        raise WrongModel(f"{kind}, and architectures name no class: give the config.json of a model")
    if architecture not in architectures():
        raise UnknownArchitecture(f"unknown architecture ({key} {architecture})")
    try:
        shape = shape_of(fields, architecture)
    except WrongModel:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise WrongModel(f"a field of the config cannot be read: {error}") from None
    return replace(shape, name=name or text(fields, "_name_or_path") or architecture, notes=(*shape.notes, *notes))


def _mistral_fields(fields: Fields) -> Fields:
    """Return the fields of Mistral's own params.json, some of whose sizes have other names."""
    if other := [name for name in ("kv_lora_rank", "vision_encoder", "ssm_cfg", "d_model") if fields.get(name)]:
        raise UnknownArchitecture(f"params.json with {', '.join(other)}")
    experts = fields.get("moe")
    if not isinstance(experts, Mapping):
        experts = {}
    elif set(experts) - {"num_experts", "num_experts_per_tok"}:
        raise UnknownArchitecture(f"params.json with moe: {', '.join(experts)}")
    renamed = {"n_kv_heads": "num_key_value_heads", "tied_embeddings": "tie_word_embeddings"}
    kind = {"model_type": "mixtral" if experts else "mistral"}
    return {**fields, **kind, **{name: fields[key] for key, name in renamed.items() if key in fields}, **experts}


def _text_model_fields(inner: Fields, outer: Fields, notes: list[str]) -> Fields:
    """Return the fields of the text model in a multimodal config: transformers leaves out those with its defaults."""
    stated = {key: value for key, value in inner.items() if value is not None}
    stated["tie_word_embeddings"] = _is_tied(inner, outer, notes)
    defaults = config_tables()["text_defaults"].get(text(inner, "model_type"), {})
    if absent := [key for key in defaults if key not in stated]:
        notes.append(f"text_config has no {', '.join(absent)}: the defaults of transformers are taken")
    return {**defaults, **stated}


def _is_tied(inner: Fields, outer: Fields, notes: list[str]) -> bool | None:
    """Return whether the head of a multimodal model is its embedding; None: the default of the text model."""
    kind, key = text(outer, "model_type"), "tie_word_embeddings"
    rule = next((rule for rule, kinds in config_tables()["tied"].items() if kind in kinds), "")
    read = {"inner": [inner], "": [inner, outer], "either": [inner, outer]}.get(rule, [outer])
    values = [flag(config, key, False) for config in read if config.get(key) is not None]
    if rule == "outer_or_true" and not values:
        notes.append(f"{key} of {kind} is not stated: transformers ties the head, a checkpoint may have its own")
    default = {"outer_or_true": True, "outer_or_false": False, "either": False}.get(rule)
    return any(values) if rule == "either" else next(iter(values), default)


#: Fields that are lists, with a value for each layer.
_PER_LAYER = re.compile(".*per_layer.*|block_configs|.*_multipliers")
_NO_SIZES = "there are no formulas for a size of each layer"
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@cache
def architectures() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = config_tables()["layers"]
    return rows | {kind: rows[other] for kind, other in config_tables()["same"].items()}


def field_names(kind: str) -> list[str]:
    return list(config_tables()["names"][kind])


@cache
def config_tables() -> dict[str, Any]:
    return msgspec.toml.decode(Path(__file__).with_name("architectures.toml").read_bytes(), type=dict[str, Any])


def shape_of(fields: Fields, architecture: str) -> ModelShape:
    """Return the shape of a model whose architecture is in the table."""
    row = architectures()[architecture]
    stated = {key: value for key, value in fields.items() if key not in row.get("ignored", ())}
    fields = {**row.get("defaults", {}), **stated}
    if architecture == "falcon":
        fields = _falcon_fields(fields)
    latent = LatentAttention(**_table_values(fields, row["latent"])) if "latent" in row else None
    if latent:
        head_dim = latent.nope_head_dim + latent.rope_head_dim
        fields = {**fields, "head_dim": head_dim, "num_key_value_heads": size_in(fields, "heads")}
    shape = _usual_shape(fields, row)
    normed_heads = {"": 0, "head": 2, "all": shape.heads + shape.kv_heads}[row.get("qk_norm", "")]
    has_norms = "qk_norm_if" not in row or flag(fields, row["qk_norm_if"], False)
    experts = _experts(fields, shape, row["experts"]) if "experts" in row else None
    notes = ("the module that predicts a further token (MTP) is not counted",)
    return replace(
        shape,
        qk_norm_per_layer=normed_heads * shape.head_dim if has_norms else 0,
        other_per_layer=shape.heads if "sinks" in row else 0,
        experts=experts,
        latent=latent,
        notes=notes if experts and fields.get("num_nextn_predict_layers") else (),
    )


def _usual_shape(fields: Fields, row: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the usual layer: attention with grouped queries, an MLP and two norms."""
    if listed := [key for key in fields if _PER_LAYER.fullmatch(key) and isinstance(fields[key], (list, dict))]:
        raise UnknownArchitecture(f"{listed[0]} is {as_json(fields[listed[0]])}: {_NO_SIZES}")
    hidden, heads, layers = size_in(fields, "hidden"), size_in(fields, "heads"), size_in(fields, "layers")
    if other := [key for key in row.get("unknown", ()) if fields.get(key) not in (None, False, hidden)]:
        raise UnknownArchitecture(f"{other[0]} is {as_json(fields[other[0]])}: there are no formulas for such layers")
    if not fields.get("head_dim") and hidden % heads:
        raise WrongModel(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    window = number_in(fields, "sliding_window", 0) if flag(fields, "use_sliding_window", True) else 0
    sliding, bias = _num_sliding_layers(fields, layers), _table_value(fields, row.get("bias", False))
    activations = [text(fields, key) for key in ("hidden_activation", "hidden_act", "activation_function")]
    shape = ModelShape(
        name="",
        architecture=text(fields, "model_type"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number_in(fields, "num_key_value_heads", heads),
        head_dim=number_in(fields, "head_dim", hidden // heads),
        intermediate=size_in(fields, "intermediate", 4 * hidden),
        vocab=size_in(fields, "vocab"),
        tied=flag(fields, "tie_word_embeddings", row.get("tied", False)),
        qkv_bias=bias,
        out_bias=bias,
        sliding_window=window,
        sliding_layers=sliding if window else 0,
        activation=next(filter(None, activations), row.get("activation", "silu")),
        attention_cap=bool(fields.get("attn_logit_softcapping")),
        logit_cap=bool(fields.get("final_logit_softcapping")),
    )
    changes = _table_values(fields, row.get("shape", {}))
    changes["positions"] = changes.get("positions", 0) + row.get("more_positions", 0)
    return replace(shape, **changes)


def _table_value(fields: Fields, value: Any) -> Any:
    """Return a constant of the table, or the first of its fields that the config states, or their default."""
    if not isinstance(value, list):
        return value
    names = [name for name in value if isinstance(name, str)]
    default = value[-1] if len(names) < len(value) else None
    key = next((name for name in names if fields.get(name) is not None), names[-1])
    return flag(fields, key, default) if isinstance(default, bool) else number_in(fields, key, default)


def _table_values(fields: Fields, row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _table_value(fields, value) for name, value in row.items()}


def _num_sliding_layers(fields: Fields, layers: int) -> int:
    kinds, pattern = fields.get("layer_types"), fields.get("sliding_window_pattern")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise WrongModel(f"layer_types is {as_json(kinds)}, not a list of {layers} layers")
        if other := [kind for kind in kinds if kind not in _LAYER_TYPES]:
            raise UnknownArchitecture(f"layer_types has {as_json(other[0])}: there are no formulas for such a layer")
        return kinds.count("sliding_attention")
    if isinstance(pattern, str):  # such as LLLG of EXAONE 4: local and global layers, of which the last one is global
        if not re.fullmatch("[LG]+", pattern):
            raise WrongModel(f"sliding_window_pattern is {as_json(pattern)}, not a number or letters L and G")
        return sum(pattern[layer % len(pattern)] == "L" for layer in range(layers - 1))
    if period := number_in(fields, "sliding_window_pattern", 0):  # the last layer of each period has no window
        return layers - layers // period
    return max(layers - number_in(fields, "max_window_layers", 0), 0)  # this number of first layers has no window


def _experts(fields: Fields, shape: ModelShape, row: Mapping[str, Any]) -> Experts | None:
    """Return the experts, in the layers after the first dense ones, every Nth, without the dense ones of a list."""
    if not _table_value(fields, row["total"]):
        return None
    stated = _table_values(fields, row)
    width = stated.setdefault("intermediate", shape.intermediate)
    first, period = number_in(fields, "first_k_dense_replace", 0), number_in(fields, "moe_layer_freq", 1)
    step = number_in(fields, "decoder_sparse_step", number_in(fields, "interleave_moe_layer_step", 1))
    dense_layers, expert_layers = fields.get("mlp_only_layers") or [], fields.get("moe_layers")
    layers = sum(
        layer >= first and layer % period == 0 and (layer + 1) % step == 0 and layer not in dense_layers
        for layer in range(shape.layers)
    )
    stated = {"shared_intermediate": width * stated.pop("shared", 0), **stated}
    return Experts(**stated, layers=len(expert_layers) if isinstance(expert_layers, list) else layers)


def _falcon_fields(fields: Fields) -> Fields:
    """Return the fields with the numbers of key-value heads and norms, which follow from switches."""
    heads, norms = size_in(fields, "heads"), 1 if flag(fields, "parallel_attn", True) else 2
    kv_heads = 1 if flag(fields, "multi_query", True) else heads
    if flag(fields, "new_decoder_architecture", False):
        kv_heads, norms = number_in(fields, "num_kv_heads", heads), number_in(fields, "num_ln_in_parallel_attn", 2)
    return {**fields, "num_key_value_heads": kv_heads, "norms_per_layer": norms}


class KnownModel(msgspec.Struct, frozen=True):
    """A row of known_models.json: the sizes of a published config.json."""

    name: str
    repository: str
    source: str
    compared: str | None  # the public place whose sizes were compared with the row; None: not compared
    config: dict[str, Any]
    published_parameters: int | None = None
    aliases: tuple[str, ...] = ()
    note: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        unsure = "" if self.compared else "the sizes of this row were not compared with a source: check its config.json"
        return tuple(note for note in (self.note, unsure) if note)

    @property
    def shape(self) -> ModelShape:
        return read_config(self.config, self.name)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all rows in the order of the file."""
    return msgspec.json.decode(Path(__file__).with_name("known_models.json").read_bytes(), type=tuple[KnownModel, ...])


def find_variant(name: str) -> KnownModel | None:
    """Return the model whose sizes a variant of this name has, such as NAME-Instruct; not for quantized variants."""
    short = name.split("/")[-1].lower().removeprefix("meta-")
    while (shorter := re.sub(_VARIANT, "", short)) != short:
        short = shorter
    return find_model(short)


#: Ends of names that leave the sizes of a model as they are: tuned models, releases by month, formats.
_VARIANT = r"[-_](instruct|chat|base|it|pt|hf|thinking|bf16|\d{4})$"


def similar_names(name: str) -> list[str]:
    """Return the names of the table that are nearest to a name, or else its first names."""
    plain = {_plain(row.name): row.name for row in known_models()}
    near = difflib.get_close_matches(_plain(name.split("/")[-1]), plain, 4, 0.5)
    return [plain[key] for key in near] or [*list(plain.values())[:4], "..."]


def find_model(name: str) -> KnownModel | None:
    """Return the model with a name, an alias or a repository; letters other than a to z and digits do not count."""
    for row in known_models():
        if _plain(name) in map(_plain, (row.name, row.repository, row.repository.split("/")[-1], *row.aliases)):
            return row
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
