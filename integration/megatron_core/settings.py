"""The run configuration: a YAML file with a section for each dataclass below, and flags that override the file."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

SYSTEM = "megatron_core"


class SettingsError(ValueError):
    """An invalid run configuration. The message has the place and the reason."""


@dataclass(frozen=True)
class Model:
    """A GPT over bytes."""

    num_layers: int = 2
    hidden_size: int = 128
    num_attention_heads: int = 4
    tie_embeddings: bool = True


@dataclass(frozen=True)
class Data:
    """Sizes of sequences and batches; a sample is one sequence."""

    sequence_length: int = 128
    micro_batch_size: int = 4
    global_batch_size: int = 32


@dataclass(frozen=True)
class Training:
    """Length, learning rate and interruptions of the training; with an interval of 0 there are no interruptions."""

    iterations: int = 60
    learning_rate: float = 0.001
    warmup_iterations: int = 10
    seed: int = 1234
    evaluation_interval: int = 0
    evaluation_batches: int = 1
    checkpoint_interval: int = 0


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the model-parallel groups; all other parallelism is data parallelism."""

    tensor: int = 1
    pipeline: int = 1


@dataclass(frozen=True)
class Metrics:
    """Settings of effllm."""

    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """A complete run configuration."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    metrics: Metrics = field(default_factory=Metrics)


MAY_BE_ZERO = {"seed", "warmup_iterations", "evaluation_interval", "checkpoint_interval"}


def read_settings(path: Path) -> Settings:
    """Return the run configuration in ``path``.

    Raises:
        SettingsError: the file is not a run configuration of this system.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from error
    sections = dict(_mapping(content, str(path)))
    if sections.pop("system", SYSTEM) != SYSTEM:
        raise SettingsError(f"{path}: 'system' must be {SYSTEM}: other systems have folders of their own")
    _reject_unknown(sections, ["system", *(entry.name for entry in fields(Settings))], f"{path}: section")
    return Settings(
        **{
            entry.name: _section(entry.default_factory(), sections[entry.name], f"{path}: {entry.name}")  # type: ignore[misc]
            for entry in fields(Settings)
            if sections.get(entry.name) is not None
        }
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> Settings:
    """Return the run configuration from the command line."""
    parser = argparse.ArgumentParser(description="Pre-train a small GPT with megatron-core, measured by effllm.")
    parser.add_argument("--config", type=Path, help="run configuration, such as configs/demo.yaml")
    for flag, (section, name) in FLAGS.items():
        parser.add_argument(flag, type=type(_default(section, name)), metavar="N", help=f"overrides {section}.{name}")
    given = vars(parser.parse_args(arguments))
    try:
        settings = read_settings(given["config"]) if given["config"] else Settings()
        for flag, (section, name) in FLAGS.items():
            value = given[flag.removeprefix("--").replace("-", "_")]
            if value is not None:
                changed = _section(getattr(settings, section), {name: value}, f"{flag}: {section}")
                settings = replace(settings, **{section: changed})
    except SettingsError as error:
        parser.error(str(error))
    return settings


FLAGS = {
    "--tp": ("parallelism", "tensor"),
    "--pp": ("parallelism", "pipeline"),
    "--iterations": ("training", "iterations"),
    "--learning-rate": ("training", "learning_rate"),
    "--seed": ("training", "seed"),
    "--micro-batch-size": ("data", "micro_batch_size"),
    "--global-batch-size": ("data", "global_batch_size"),
    "--sequence-length": ("data", "sequence_length"),
}


def data_parallel_size(settings: Settings, world_size: int) -> int:
    """Return the number of replicas of the model in ``world_size`` processes.

    Raises:
        SettingsError: model or batch cannot be divided evenly over the processes.
    """
    tensor, pipeline = settings.parallelism.tensor, settings.parallelism.pipeline
    replicas = world_size // (tensor * pipeline) or 1
    for what, number, divisor in (
        ("processes", world_size, tensor * pipeline),
        ("model.num_attention_heads", settings.model.num_attention_heads, tensor),
        ("model.hidden_size", settings.model.hidden_size, settings.model.num_attention_heads),
        ("model.num_layers", settings.model.num_layers, pipeline),
        ("data.global_batch_size", settings.data.global_batch_size, settings.data.micro_batch_size * replicas),
    ):
        if number % divisor:
            raise SettingsError(
                f"{what}={number} does not divide by {divisor} "
                f"(tensor={tensor}, pipeline={pipeline}, {world_size} processes)"
            )
    return replicas


def _default(section: str, name: str) -> Any:
    return getattr(getattr(Settings(), section), name)


def _section(section: Any, values: Any, where: str) -> Any:
    given = _mapping(values, where)
    _reject_unknown(given, [entry.name for entry in fields(section)], f"{where}:")
    return replace(section, **{k: _checked(k, v, getattr(section, k), where) for k, v in given.items()})


def _mapping(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise SettingsError(f"{where}: names with values are expected, not {values!r}")
    return values


def _reject_unknown(given: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise SettingsError(
                f"{where} {key!r} is not known; " + (f"did you mean {near[0]!r}?" if near else f"known: {known}")
            )


def _checked(name: str, value: Any, default: Any, where: str) -> Any:
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(default):
        raise SettingsError(f"{where}.{name}={value!r} must be of type {type(default).__name__}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        minimum = 0 if name in MAY_BE_ZERO else 1 if isinstance(value, int) else 1e-12
        if not minimum <= value < math.inf:
            raise SettingsError(f"{where}.{name}={value!r} must be at least {minimum}")
    return value
