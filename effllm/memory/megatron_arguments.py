"""Read a model and its plan from Megatron's arguments, or from a launch script with these arguments.

A script is not run: assignments of variables and arrays are replaced in the text, and every ``--name`` with its value
is an argument.  The shape is that of Megatron's GPT model with these arguments.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from effllm.memory.model import Experts, LatentAttention, ModelShape, WrongModel

Arguments = Mapping[str, str]

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(\([^)]*\)|\"[^\"]*\"|'[^']*'|[^\s;#]*)", re.M)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
MAX_VALUE = 100_000  # letters
#: Vocabularies of tokenizers whose size is not an argument.
TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}


def read_script(text: str) -> dict[str, str]:
    """Return the arguments in a launch script, or in a list of arguments."""
    text = re.sub(r"\\\n", " ", text)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    values: dict[str, str] = {}
    for name, value in _ASSIGNMENT.findall(text):
        # As in a shell, a value has the variables that were assigned before.
        values[name] = _VARIABLE.sub(lambda match: _value(match, values), value.strip("()\"'"))[:MAX_VALUE]
    return _arguments(_VARIABLE.sub(lambda match: _value(match, values), text))


def _value(match: re.Match[str], values: Mapping[str, str]) -> str:
    name = match[1] or match[3]
    return values.get(name, match[2] or "")


def _arguments(text: str) -> dict[str, str]:
    text = re.sub(r"[()\"']", " ", text)
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    found: dict[str, str] = {}
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else ""
        # The last argument counts, as in argparse.
        found[name.replace("_", "-")] = value if equals else following
    return found


def is_megatron(arguments: Arguments) -> bool:
    return "num-layers" in arguments and "hidden-size" in arguments


def read_shape(arguments: Arguments, name: str) -> ModelShape:
    """Return the model of Megatron's arguments.

    Raises:
        WrongModel: an argument is missing or impossible.
    """
    layers, hidden = _number(arguments, "num-layers"), _number(arguments, "hidden-size")
    heads = _number(arguments, "num-attention-heads")
    gated = "swiglu" in arguments
    width = _number(arguments, "ffn-hidden-size", 4 * hidden if not gated else (4 * hidden * 2 // 3) // 64 * 64)
    bias = "disable-bias-linear" not in arguments
    groups = _number(arguments, "num-query-groups", 1) if "group-query-attention" in arguments else heads
    if "kv-channels" not in arguments and (heads < 1 or hidden % heads):
        raise WrongModel(f"--hidden-size {hidden:,} is not a multiple of --num-attention-heads {heads:,}")
    head_dim = _number(arguments, "kv-channels", hidden // max(heads, 1))
    rms, learned = arguments.get("normalization") == "RMSNorm", _learned_positions(arguments)
    return ModelShape(
        name=name,
        architecture="megatron",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=groups,
        head_dim=head_dim,
        intermediate=width,
        vocab=_vocabulary(arguments),
        tied="untie-embeddings-and-output-weights" not in arguments,
        gated_mlp=gated,
        qkv_bias=bias or "add-qkv-bias" in arguments,
        out_bias=bias,
        mlp_bias=bias,
        positions=learned,
        norm_bias=not rms,
        layer_norm=not rms,
        qk_norm_per_layer=2 * head_dim * (1 if rms else 2) if "qk-layernorm" in arguments else 0,
        experts=_experts(arguments, layers, width),
        latent=_latent(arguments),
        activation="squared_relu" if "squared-relu" in arguments else "silu" if gated else "gelu",
        fused_qkv=True,
        fused_gate=True,
    )


def read_settings(arguments: Arguments) -> dict[str, Any]:
    """Return the settings of a plan, with ``gpus`` and ``global_batch`` where they are stated."""
    sizes = {
        "tp": "tensor-model-parallel-size",
        "pp": "pipeline-model-parallel-size",
        "cp": "context-parallel-size",
        "ep": "expert-model-parallel-size",
        "seq_length": "seq-length",
        "micro_batch": "micro-batch-size",
        "global_batch": "global-batch-size",
    }
    found: dict[str, Any] = {key: _number(arguments, name) for key, name in sizes.items() if arguments.get(name)}
    found["implementation"] = "megatron"
    found["precision"] = "bf16-master" if {"bf16", "fp16"} & set(arguments) else "fp32"
    found["optimizer"] = "sgd-momentum" if arguments.get("optimizer") == "sgd" else "adamw"
    found["zero"] = 1 if "use-distributed-optimizer" in arguments else 0
    if found.get("tp", 1) > 1 and "sequence-parallel" in arguments:
        found["sequence_parallel"] = True
    if "recompute-activations" in arguments:
        found["checkpointing"] = "selective"
    if stated := arguments.get("recompute-granularity"):
        found["checkpointing"] = "full" if stated == "full" else "selective"
    processes, nodes = arguments.get("nproc-per-node", ""), arguments.get("nnodes", "1")
    if processes.isdigit() and nodes.isdigit():
        found["gpus"] = int(processes) * int(nodes)
    return found


def _learned_positions(arguments: Arguments) -> int:
    if arguments.get("position-embedding-type", "learned_absolute") != "learned_absolute":
        return 0
    if "use-rotary-position-embeddings" in arguments:
        return 0
    return _number(arguments, "max-position-embeddings", _number(arguments, "seq-length", 0))


def _vocabulary(arguments: Arguments) -> int:
    """Return the padded vocabulary."""
    if arguments.get("padded-vocab-size"):
        return _number(arguments, "padded-vocab-size")
    known = TOKENIZERS.get(arguments.get("tokenizer-type", ""))
    if not arguments.get("vocab-size") and known is None:
        raise WrongModel("the arguments have no --vocab-size: Megatron reads it from the tokenizer; add --vocab-size N")
    size = _number(arguments, "vocab-size", known)
    multiple = _number(arguments, "make-vocab-size-divisible-by", 128)
    multiple *= _number(arguments, "tensor-model-parallel-size", 1)
    if multiple < 1:
        raise WrongModel(f"the vocabulary cannot be a multiple of {multiple}")
    return -(-size // multiple) * multiple


def _experts(arguments: Arguments, layers: int, width: int) -> Experts | None:
    if not arguments.get("num-experts"):
        return None
    every = arguments.get("moe-layer-freq", "1")
    if every.isdigit() and int(every):
        sparse = sum(layer % int(every) == 0 for layer in range(min(layers, 10_000)))
    else:
        raise WrongModel(f"--moe-layer-freq {every}: only a whole number can be read")
    return Experts(
        total=_number(arguments, "num-experts"),
        active=_number(arguments, "moe-router-topk", 2),
        intermediate=_number(arguments, "moe-ffn-hidden-size", width),
        layers=sparse,
        shared_intermediate=_number(arguments, "moe-shared-expert-intermediate-size", 0),
        expert_bias="disable-bias-linear" not in arguments,
    )


def _latent(arguments: Arguments) -> LatentAttention | None:
    if "multi-latent-attention" not in arguments:
        return None
    return LatentAttention(
        kv_rank=_number(arguments, "kv-lora-rank", 32),
        nope_head_dim=_number(arguments, "qk-head-dim", 128),
        rope_head_dim=_number(arguments, "qk-pos-emb-head-dim", 64),
        value_head_dim=_number(arguments, "v-head-dim", 128),
        q_rank=_number(arguments, "q-lora-rank", 0),
    )


def _number(arguments: Arguments, name: str, default: int | None = None) -> int:
    value = arguments.get(name, "")
    if not value:
        if default is None:
            raise WrongModel(f"the arguments have no --{name}")
        return default
    if not re.fullmatch(r"-?\d{1,15}", value):
        raise WrongModel(f"--{name} is {value!r}, not a whole number")
    return int(value)
