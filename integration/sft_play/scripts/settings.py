"""The YAML file of a run: its sections and keys, checked before anything slow is imported."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

BACKENDS = ("bnb", "unsloth", "torch")
DATASETS = ("sft", "cpt", "cpt_mixed")


class WrongSettings(ValueError):
    """The file has a wrong key or value; the message is one line."""


@dataclass
class Model:
    """The model; without this section, a tiny Llama."""

    name: str = "tiny-llama"
    revision: str = "main"  # branch or commit on the Hub
    max_seq_len: int = 512
    llama: dict[str, int] = field(default_factory=dict)  # sizes of a Llama that is created on the spot


@dataclass
class Data:
    """The texts for the training."""

    type: str = "sft"
    path: str = ""  # JSON lines with "text", or "prompt" and "completion"; if empty, the text is generated
    packing: bool = False


@dataclass
class Lora:
    """The adapters."""

    r: int = 0  # 0: all parameters are trained
    alpha: int = 32
    dropout: float = 0.05


@dataclass
class Tuning:
    """The method of training, and the library that trains the model."""

    backend: str = "torch"
    lora: Lora = field(default_factory=Lora)


@dataclass
class Train:
    """Arguments of the Trainer."""

    output_dir: str = "outputs/run"
    max_steps: int = 100
    batch_size: int = 8
    grad_accum: int = 1
    learning_rate: float = 2e-4
    optim: str = "adamw_torch"
    bf16: bool = False
    fp16: bool = False
    seed: int = 42
    num_workers: int = 0
    logging_steps: int = 10


@dataclass
class Metrics:
    """The settings of the measurement, and the CSV file for the row."""

    enable_energy_logging: bool = True
    sample_interval_s: float = 0.05
    warmup_s: float = 60.0
    log_vram_every_s: float = 1.0
    results_csv: str = "outputs/energy_results.csv"


@dataclass
class Settings:
    """The whole file."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    tuning: Tuning = field(default_factory=Tuning)
    train: Train = field(default_factory=Train)
    metrics: Metrics = field(default_factory=Metrics)


def read_settings(path: Path) -> Settings:
    """Return the settings of a YAML file.

    Raises:
        WrongSettings: the file cannot be read, or has an unknown key or a wrong value.
    """
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise WrongSettings(" ".join(str(error).split())) from error
    settings: Settings = _section(Settings, content, "")
    _check(settings)
    return settings


def _section(kind: Any, content: Any, place: str) -> Any:
    if not isinstance(content, dict):
        raise WrongSettings(f"{place or 'the file'} must have keys and values")
    types = get_type_hints(kind)
    values = {}
    for key, value in content.items():
        if key not in types:
            near = difflib.get_close_matches(str(key), types, 1)
            raise WrongSettings(f"{place}{key} is not a key" + (f"; did you mean {near[0]}?" if near else ""))
        values[key] = _value(types[key], value, f"{place}{key}")
    return kind(**values)


def _value(kind: Any, value: Any, place: str) -> Any:
    if is_dataclass(kind):
        return _section(kind, value, f"{place}.")
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 2e-4 as a text
        except ValueError:
            pass
    wanted = dict if kind == dict[str, int] else kind
    if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
        raise WrongSettings(f"{place}: {value!r} must be of type {wanted.__name__}")
    return value


def _check(settings: Settings) -> None:
    metrics, train = settings.metrics, settings.train
    for name, value, allowed in (
        ("tuning.backend", settings.tuning.backend, BACKENDS),
        ("data.type", settings.data.type, DATASETS),
    ):
        if value not in allowed:
            raise WrongSettings(f"{name}: {value!r} must be one of {', '.join(allowed)}")
    for name, number, least in (
        ("metrics.sample_interval_s", metrics.sample_interval_s, 0.01),
        ("metrics.log_vram_every_s", metrics.log_vram_every_s, 0.01),
        ("metrics.warmup_s", metrics.warmup_s, 0.0),
        ("train.max_steps", train.max_steps, 1),
        ("train.batch_size", train.batch_size, 1),
        ("train.grad_accum", train.grad_accum, 1),
        ("train.num_workers", train.num_workers, 0),
        ("model.max_seq_len", settings.model.max_seq_len, 2),
    ):
        if not least <= number < float("inf"):
            raise WrongSettings(f"{name}: {number} must be at least {least}")
    if train.bf16 and train.fp16:
        raise WrongSettings("train.bf16 and train.fp16 must not both be true")
