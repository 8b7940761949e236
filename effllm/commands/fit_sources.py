"""Find the model of an argument of ``effllm fit``: a file, a folder or a name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from effllm.analysis.yaml_document import load_yaml
from effllm.config.isolated import NoAnswer
from effllm.memory.config_json import UnknownArchitecture, find_model, find_variant, read_config, similar_names
from effllm.memory.megatron_arguments import notes_of_ambiguous_sizes, read_script, read_settings, read_shape
from effllm.memory.model_count import can_count, count_model, stated_model, with_counted
from effllm.memory.plan import ModelShape, WrongModel
from effllm.memory.yaml_settings import StatedFields, note_of_left_out, read_yaml, system_of

MAX_BYTES = 10**7  # of a config file


class UnreadableModel(ValueError):
    """An argument that names no readable model, with the reason and the remedy."""


class UnknownModel(ValueError):
    """A model of an architecture whose parameters cannot be counted here, with the remedy."""


class StatedSizes(NamedTuple):
    """Sizes in options, for what a file does not state."""

    vocab: int | None = None  # of a script of Megatron
    parameters: int | None = None
    active_parameters: int | None = None


NONE_STATED = StatedSizes()


@dataclass(frozen=True)
class FoundModel:
    """A model with the source of its sizes, and the settings that its file states."""

    shape: ModelShape | None  # None: only settings, of an accelerate YAML
    source: str
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)  # of a plan
    config: dict[str, Any] | None = None  # the fields of a config.json


def find_source(text: str, sizes: StatedSizes = NONE_STATED) -> FoundModel:
    """Return the model of an argument; ``sizes`` are those of the options, for what the file does not state."""
    if not text.strip():
        raise UnreadableModel("MODEL is empty: give a file, a folder or a name")
    if "--num-layers" in text:  # the text is a command line of Megatron
        try:
            return _model_of_megatron(text, sizes.vocab, "arguments", "arguments")
        except WrongModel as error:
            raise UnreadableModel(str(error)) from None
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise UnreadableModel(f"{text} is a folder without a config.json: give the folder of a model, or a file")
    if path.is_file():
        return _model_of_file(path, sizes)
    if model := find_model(text):
        return FoundModel(model.shape, f"table: {model.source}", model.notes, config=model.config)
    if model := find_variant(text):
        note = f"{text} is taken as a variant of {model.name}, with the same sizes: otherwise give its config.json"
        return FoundModel(model.shape, f"table: {model.source}", (*model.notes, note), config=model.config)
    names = ", ".join(similar_names(text))
    if "/" in text and not text.startswith(("/", ".")):
        raise UnreadableModel(
            f"{text} is not in the table, and nothing is downloaded: download config.json of this model, and give the "
            f"path of that file. Names of the table near to it: {names}"
        )
    raise UnreadableModel(f"there is no file {text}, and no model of this name in the table: {names}")


def _model_of_file(path: Path, sizes: StatedSizes) -> FoundModel:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UnreadableModel(f"{path} is too large for a config: give the config.json of the model")
        text = path.read_text()
    except OSError as error:
        raise UnreadableModel(f"{path}: {error.strerror}") from None
    except ValueError:
        raise UnreadableModel(f"{path} is not a text file: give the config.json of the model") from None
    if not text.strip():
        raise UnreadableModel(f"{path} is empty: give the config.json of the model")
    try:
        if path.suffix in (".yaml", ".yml"):
            return _model_of_yaml(path, text, sizes)
        if path.suffix != ".json" and {"num-layers", "hidden-size"} <= read_script(text).keys():
            return _model_of_megatron(text, sizes.vocab, path.stem, str(path))
        return _model_of_json(path, text, sizes)
    except (RecursionError, WrongModel) as error:
        raise UnreadableModel(f"{path}: {error}") from None


def _model_of_json(path: Path, text: str, sizes: StatedSizes) -> FoundModel:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = (
            f"not JSON: {error}" if path.suffix == ".json" else "neither JSON nor a script of Megatron with the sizes"
        )
        remedy = "give the config.json of the model, or the file that has --num-layers and --hidden-size"
        raise UnreadableModel(f"{path} is {what}; {remedy}") from None
    if not isinstance(fields, dict):
        raise UnreadableModel(
            f"{path} is not the config of a model, because it has no fields: give the config.json of the model"
        )
    shape = _shape_of_config(fields, _model_name(path, fields), sizes)
    return FoundModel(shape, str(path), shape.notes, config=fields)


def _shape_of_config(fields: dict[str, Any], name: str, sizes: StatedSizes) -> ModelShape:
    """Return the shape of a config, with the parameters of the model that transformers builds, if it is installed."""
    formula_error: WrongModel | None = None
    try:
        shape = read_config(fields, name)
    except WrongModel as error:  # the formulas have other rules than the class of the model
        shape, formula_error, reason = None, error, str(error)
    is_unknown = isinstance(formula_error, UnknownArchitecture)  # transformers may have this architecture
    config_error = None if is_unknown else formula_error  # a wrong field
    if is_unknown and sizes.parameters is not None:
        return stated_model(name, str(fields.get("model_type") or ""), sizes.parameters, sizes.active_parameters)
    if not can_count():
        if config_error is not None:
            raise config_error
        if shape is None:
            raise UnknownModel(f"{reason}: pip install 'effllm[fit]' counts its parameters, or give --params N")
        return shape
    try:
        counted = count_model(fields, name)
    except NoAnswer as error:
        if config_error is not None:
            raise config_error from None
        if shape is None:
            raise UnknownModel(f"{reason}, and {error}: give --params N") from None
        return replace(shape, notes=(*shape.notes, f"by formulas, because {error}"))
    return counted if shape is None else with_counted(shape, counted)


def _model_of_megatron(text: str, vocab_size: int | None, name: str, source: str) -> FoundModel:
    stated = {} if vocab_size is None else {"vocab-size": str(vocab_size)}
    arguments = StatedFields({**stated, **read_script(text)})
    settings, notes = read_settings(arguments)
    shape = read_shape(arguments, name)
    unread = [f"--{name}" for name in arguments.unread("megatron")]
    return FoundModel(shape, source, (*notes, *notes_of_ambiguous_sizes(text), *note_of_left_out(unread)), settings)


def _model_of_yaml(path: Path, text: str, sizes: StatedSizes) -> FoundModel:
    """Return the model of a training's YAML, or the settings of an accelerate YAML."""
    try:
        import yaml
    except ImportError:
        raise UnreadableModel("a YAML file needs PyYAML: pip install 'effllm[analysis]'") from None
    try:
        fields = load_yaml(text)
    except yaml.YAMLError as error:
        raise UnreadableModel(f"{path} is not YAML: {error}") from None
    system, key = system_of(fields) if isinstance(fields, dict) else ("", "")  # the key with the name of the model
    if not system:
        raise UnreadableModel(
            f"{path} is neither of LLaMA-Factory (model_name_or_path), axolotl (base_model) or ms-swift (model and "
            "max_length) nor of accelerate (distributed_type)"
        )
    if not key:  # accelerate: only settings
        deepspeed = fields.get("deepspeed_config")
        file = deepspeed.get("deepspeed_config_file") if isinstance(deepspeed, dict) else None
        settings, notes = read_yaml(system, fields, _read_deepspeed_file(path, str(file)) if file else None)
        return FoundModel(None, str(path), tuple(notes), settings)
    settings, notes = read_yaml(system, fields, _deepspeed_config(path, fields.get("deepspeed")))
    named = fields[key]
    if not isinstance(named, str) or not named.strip():
        raise UnreadableModel(f"{path}: {key} is {named!r}: give a name of the table, or a path")
    model_path = path.parent / named
    if model_path.suffix in (".yaml", ".yml"):
        raise UnreadableModel(f"{path}: {key} is {named}, which is not a model: give a name of the table, or a path")
    model = find_source(str(model_path) if model_path.exists() else named, sizes)
    return FoundModel(model.shape, f"{path}, {model.source}", (*model.notes, *notes), settings, model.config)


def _deepspeed_config(path: Path, stated: Any) -> dict[str, Any] | None:
    """Return the config of DeepSpeed in a YAML: a mapping, the path of a file, or a name of ms-swift such as zero2."""
    if isinstance(stated, dict) or not stated:
        return stated or None
    if short := re.fullmatch(r"zero([0-3])(_offload)?", str(stated)):
        offload = {"offload_optimizer": {"device": "cpu"}} if short[2] else {}
        return {"zero_optimization": {"stage": int(short[1]), **offload}}
    return _read_deepspeed_file(path, str(stated))


def _read_deepspeed_file(path: Path, named: str) -> dict[str, Any]:
    """Return the DeepSpeed config that a YAML names, relative to a folder above the YAML or to the current folder."""
    for candidate in (Path(named), *(folder / named for folder in path.resolve().parents)):
        if candidate.is_file() and candidate.stat().st_size < MAX_BYTES:
            try:
                fields = json.loads(candidate.read_text())
            except (OSError, ValueError, RecursionError) as error:
                raise UnreadableModel(f"{candidate}: {error}") from None
            return fields if isinstance(fields, dict) else {}
    raise UnreadableModel(f"{path} names the DeepSpeed config {named}, which is not there: put it beside the YAML")


def _model_name(path: Path, fields: dict[str, Any]) -> str:
    stated = fields.get("_name_or_path")
    if isinstance(stated, str) and stated.strip("./"):
        return stated.rstrip("/").split("/")[-1]
    return path.resolve().parent.name if path.name == "config.json" else path.stem
