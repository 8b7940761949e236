"""The model, its data and its collator, for each backend."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from typing import Any

from settings import Settings, WrongSettings

PADDING = 256  # padding token of the tiny model, whose other tokens are bytes
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
PACKAGES = {"bnb": "bitsandbytes", "unsloth": "unsloth"}
CPU_TWINS = {"bnb": "adamw", "unsloth": "adafactor"}  # configurations that need no GPU


def missing(backend: str) -> str:
    """Return the reason why a backend cannot run here, or an empty text."""
    import torch

    package = PACKAGES.get(backend)
    if package is None:
        return ""
    if not torch.cuda.is_available():
        return f"backend {backend} needs an NVIDIA GPU"
    return "" if importlib.util.find_spec(package) else f"backend {backend} needs the package {package}"


def load(settings: Settings) -> tuple[Any, Callable[[str], list[int]], int]:
    """Return the model, its tokenizer as a function, and the padding token."""
    backend, name, revision = settings.tuning.backend, settings.model.name, settings.model.revision
    if backend == "unsloth":
        return _unsloth(settings)
    if backend == "bnb":
        import torch
        from peft import prepare_model_for_kbit_training
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        compute = torch.bfloat16 if settings.train.bf16 else torch.float16
        stored = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
        model = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, quantization_config=stored, device_map={"": 0}
        )
        return (_with_lora(prepare_model_for_kbit_training(model), settings), *_tokenizer(name, revision))
    if settings.model.llama:
        return _with_lora(_tiny(settings), settings), lambda text: list(text.encode()), PADDING
    from transformers import AutoModelForCausalLM

    return (
        _with_lora(AutoModelForCausalLM.from_pretrained(name, revision=revision), settings),
        *_tokenizer(name, revision),
    )


def _tiny(settings: Settings) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(settings.train.seed)
    longest = settings.model.max_seq_len
    try:
        config = LlamaConfig(
            vocab_size=PADDING + 1, pad_token_id=PADDING, max_position_embeddings=longest, **settings.model.llama
        )
        return LlamaForCausalLM(config)
    except (TypeError, ValueError) as error:
        raise WrongSettings(f"model.llama: {' '.join(str(error).split())}") from error


def _unsloth(settings: Settings) -> tuple[Any, Callable[[str], list[int]], int]:
    from unsloth import FastLanguageModel

    lora, longest = settings.tuning.lora, settings.model.max_seq_len
    model, words = FastLanguageModel.from_pretrained(
        settings.model.name, revision=settings.model.revision, max_seq_length=longest, load_in_4bit=True
    )
    if lora.r:
        model = FastLanguageModel.get_peft_model(
            model, r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, random_state=settings.train.seed
        )
    return model, lambda text: words(text)["input_ids"], words.pad_token_id


def _with_lora(model: Any, settings: Settings) -> Any:
    lora = settings.tuning.lora
    if not lora.r:
        return model
    from peft import LoraConfig, get_peft_model

    chosen = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, chosen)


def _tokenizer(name: str, revision: str) -> tuple[Callable[[str], list[int]], int]:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(name, revision=revision)
    padding = words.eos_token_id if words.pad_token_id is None else words.pad_token_id
    return lambda text: words(text)["input_ids"], padding


def rows(settings: Settings, tokens_of: Callable[[str], list[int]]) -> list[dict[str, list[int]]]:
    """Return the training rows: the tokens of each text, cut at the maximum length."""
    train = settings.train
    count = train.max_steps * train.batch_size * train.grad_accum
    texts = _texts(settings.data.path) if settings.data.path else _generated(min(count, 4096), train.seed)
    found = [{"input_ids": tokens_of(text)[: settings.model.max_seq_len]} for text in texts]
    if not any(len(row["input_ids"]) > 1 for row in found):
        raise WrongSettings(f"{settings.data.path or 'data'}: no row has two tokens")
    return [row for row in found if len(row["input_ids"]) > 1]


def _texts(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - read once
            found = [json.loads(line) for line in file if line.strip()]
        return [one["text"] if "text" in one else one["prompt"] + one["completion"] for one in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WrongSettings(f"data.path: {path}: {type(error).__name__}: {error}") from error


def _generated(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(8, 40))) for _ in range(count)]


class Padded:
    """A collator that pads the rows of a batch to its longest row; padding has no label and no attention."""

    def __init__(self, padding: int) -> None:
        self._padding = padding

    def __call__(self, features: list[dict[str, list[int]]]) -> dict[str, Any]:
        """Return one padded batch."""
        import torch

        width = max(len(row["input_ids"]) for row in features)
        ids = torch.full((len(features), width), self._padding)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for i, row in enumerate(features):
            length = len(row["input_ids"])
            ids[i, :length] = labels[i, :length] = torch.tensor(row["input_ids"])
            mask[i, :length] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def collator(settings: Settings, padding: int) -> Any:
    """Return the collator, which either pads the rows of a batch or packs all rows into one row without padding."""
    if not settings.data.packing:
        return Padded(padding)
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()
