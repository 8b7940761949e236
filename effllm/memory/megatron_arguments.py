"""Read a model and its plan from Megatron's arguments, or from a launch script with these arguments.

A script is not run: assignments of variables and arrays are replaced in the text, sums and products of whole numbers
are computed, and every ``--name`` with its value is an argument.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from operator import add, floordiv, mod, mul, sub
from typing import Any

from effllm.memory.config_json import find_model
from effllm.memory.plan import MAX_LAYERS, MAX_SIZE, Experts, LatentAttention, ModelShape, WrongModel
from effllm.memory.yaml_settings import training_systems

Arguments = Mapping[str, str]

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(\([^)]*\)|\"[^\"]*\"|'[^']*'|[^\s;#]*)", re.M)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-((?:[^{}]|\$\{[^{}]*\})*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()\n]|\([^()\n]*\))*)\)\)")
_AS_ONE_WORD = str.maketrans(" \t()", "\ue000\ue001\ue002\ue003")  # so that a formula is not split at blanks
_AS_WRITTEN = str.maketrans("\ue000\ue001\ue002\ue003", " \t()")
_FORMULA = re.compile("\\$\ue002\ue002(.*?)\ue003\ue003")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: floordiv, ast.Mod: mod,
}  # fmt: skip
MAX_VALUE_LETTERS = 100_000


def read_script(text: str) -> dict[str, str]:
    """Return the arguments in a launch script, or in a list of arguments; the last one counts, as in argparse."""
    return dict(_arguments(text))


def notes_of_ambiguous_sizes(text: str) -> list[str]:
    """Return notes of sizes that have several values in a script, such as those of its branches."""
    sizes: dict[str, list[str]] = {}
    for name, value in _arguments(text):
        if (name in _argument_table("plan").values() or name in ("num-layers", "hidden-size", "num-experts")) and value:
            sizes.setdefault(name, []).append(value)
    several = {name: values for name, values in sizes.items() if len(set(values)) > 1}
    note = "--{} is {} in the script, whose branches are not followed: {} is taken"
    return [note.format(name, " and ".join(dict.fromkeys(values)), values[-1]) for name, values in several.items()]


def _with_variables_replaced(text: str) -> str:
    """Return a script with the values of its variables and arithmetic expressions; those without a value stay."""
    text = re.sub(r"\\\n", " ", text)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    text = _ARITHMETIC.sub(lambda match: match[0].translate(_AS_ONE_WORD), "\n".join(lines))
    values: dict[str, str] = {}
    for name, value in _ASSIGNMENT.findall(text):
        # As in a shell, a value has the variables that were assigned before.
        values[name] = _with_values(value.strip("()\"'"), values)[:MAX_VALUE_LETTERS]
    return _with_values(text, values)


def _with_values(text: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return values.get(name, match[0] if default is None else _VARIABLE.sub(value, default))

    def result(match: re.Match[str]) -> str:
        formula = match[1].translate(_AS_WRITTEN)
        names = re.sub(r"\$?\b([A-Za-z_]\w*)", lambda name: values.get(name[1], name[0]), formula)
        return _arithmetic_value(_VARIABLE.sub(value, names)) or match[0]

    return _VARIABLE.sub(value, _FORMULA.sub(result, text))


def _arithmetic_value(formula: str) -> str:
    """Return the value of an expression of whole numbers as the shell computes it; "" for any other expression."""

    def number(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < 10**15:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](number(node.left), number(node.right))
        raise ValueError

    try:
        return str(number(ast.parse(formula.strip(), mode="eval").body)) if len(formula) < 200 else ""
    except (ArithmeticError, RecursionError, SyntaxError, ValueError):
        return ""


def _arguments(script: str) -> Iterator[tuple[str, str]]:
    text = re.sub(r"[()\"';]", " ", _with_variables_replaced(script))
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        next_word = words[index + 1] if index + 1 < len(words) else ""
        following = "" if re.match(r"-(?!\d)", next_word) else next_word  # an option, no negative number
        yield name.replace("_", "-"), (value if equals else following).translate(_AS_WRITTEN)


def read_shape(arguments: Arguments, name: str) -> ModelShape:
    """Return the shape of Megatron's GPT model with these arguments; others have Megatron's defaults."""
    if other := [f"--{name}" for name in _argument_table("not_gpt")["names"] if name in arguments]:
        raise WrongModel(f"{other[0]}: only the GPT model of Megatron is known; give a config.json of the model")
    layers, hidden = _number(arguments, "num-layers"), _number(arguments, "hidden-size")
    heads = _number(arguments, "num-attention-heads")
    is_gated = _has(arguments, "swiglu", "quick-geglu")
    width = _number(arguments, "ffn-hidden-size", 4 * hidden if not is_gated else (4 * hidden * 2 // 3) // 64 * 64)
    bias = "disable-bias-linear" not in arguments
    kv_heads = _number(arguments, "num-query-groups", 1) if "group-query-attention" in arguments else heads
    if "kv-channels" not in arguments and hidden % heads:
        raise WrongModel(f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}")
    head_dim = _number(arguments, "kv-channels", hidden // heads)
    is_rms_norm = arguments.get("normalization") == "RMSNorm"
    is_learned = arguments.get("position-embedding-type", "learned_absolute") == "learned_absolute"
    is_learned &= not _has(arguments, "use-rotary-position-embeddings", "enable-gpt-oss", "no-position-embedding")
    positions = _number(arguments, "max-position-embeddings", _number(arguments, "seq-length", 0)) if is_learned else 0
    return ModelShape(
        name=name,
        architecture="megatron",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=width,
        vocab=_vocabulary(arguments),
        tied="untie-embeddings-and-output-weights" not in arguments,
        gated_mlp=is_gated,
        qkv_bias=bias or "add-qkv-bias" in arguments,
        out_bias=bias,
        mlp_bias=bias,
        positions=positions,
        norm_bias=not is_rms_norm,
        layer_norm=not is_rms_norm,
        qk_norm_per_layer=2 * head_dim * (1 if is_rms_norm else 2) if "qk-layernorm" in arguments else 0,
        other_per_layer=heads if arguments.get("softmax-type") == "learnable" else 0,  # a sink for each head
        experts=_experts(arguments, layers, width),
        latent=LatentAttention(**_numbers(arguments, "latent")) if "multi-latent-attention" in arguments else None,
        activation="squared_relu" if "squared-relu" in arguments else "silu" if is_gated else "gelu",
        fused_qkv=True,
        fused_gate=True,
    )


def read_settings(arguments: Arguments) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a plan, with ``gpus`` and ``global_batch`` where they are stated, and notes."""
    other_layers = "--spec names layers of another module: the estimate has those of Megatron's GPT model"
    notes = [other_layers] if "spec" in arguments else []
    settings: dict[str, Any] = {}
    for key, name in _argument_table("plan").items():
        if (value := arguments.get(name, "")).startswith("$"):
            notes.append(f"--{name} is {value}, which has no value in the script: it is taken as not given")
        elif value:
            settings[key] = _number(arguments, name)
    settings["implementation"] = "megatron"
    is_32_bit = "bf16" in arguments or "accumulate-allreduce-grads-in-fp32" in arguments  # gradients in 32 bits
    precision = "bf16-zero" if "grad-reduce-in-bf16" in arguments else "bf16-master" if is_32_bit else "fp16-master"
    settings["precision"] = precision if _has(arguments, "bf16", "fp16") else "fp32"
    optimizer = arguments.get("optimizer") or "adam"
    settings["optimizer"] = _argument_table("optimizers").get(optimizer, "adamw")
    if optimizer not in _argument_table("optimizers"):
        notes.append(f"--optimizer {optimizer} is estimated as AdamW")
    settings["zero"] = 1 if "use-distributed-optimizer" in arguments else 0
    if _has(arguments, "use-megatron-fsdp", "use-custom-fsdp"):
        settings["zero"] = _argument_table("sharding").get(arguments.get("data-parallel-sharding-strategy", ""), 0)
    elif "use-torch-fsdp2" in arguments:
        settings["zero"] = 3
    if settings.get("tp", 1) == 1:  # that of experts is 1, too, so the argument counts as read
        arguments.get("expert-tensor-parallel-size")
    elif "sequence-parallel" in arguments:
        settings["sequence_parallel"] = True
    granularity = arguments.get("recompute-granularity")
    if "recompute-activations" in arguments or granularity:
        settings["checkpointing"] = "full" if granularity == "full" else "selective"
    processes, nodes = arguments.get("nproc-per-node", ""), arguments.get("nnodes", "1")
    if processes.isdigit() and nodes.isdigit():
        settings["gpus"] = int(processes) * int(nodes)
    return settings, notes


def _vocabulary(arguments: Arguments) -> int:
    if arguments.get("padded-vocab-size"):
        return _number(arguments, "padded-vocab-size")
    kind = arguments.get("tokenizer-type") or ("GPT2BPETokenizer" if "merge-file" in arguments else "")
    row = find_model(arguments.get("tokenizer-model", ""))
    vocab = row.shape.vocab if row else _argument_table("vocabularies").get(kind)
    if not arguments.get("vocab-size") and vocab is None:
        raise WrongModel(
            "the arguments have no --vocab-size: Megatron reads it from the tokenizer; give --vocab-size N"
        )
    size = _number(arguments, "vocab-size", vocab)
    multiple = _number(arguments, "make-vocab-size-divisible-by", 128)
    multiple *= _number(arguments, "tensor-model-parallel-size", 1)
    return -(-size // multiple) * multiple


def _experts(arguments: Arguments, layers: int, width: int) -> Experts | None:
    if not arguments.get("num-experts"):
        return None
    has_bias = "disable-bias-linear" not in arguments
    # Every Nth layer from the first, or a list such as [0]*3+[1]*58.
    stated = arguments.get("moe-layer-freq") or "1"
    terms = [re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,5}))?", term) for term in stated.split("+")]
    if stated.isdecimal() and 0 < int(stated) <= MAX_LAYERS:
        count = -(-min(layers, MAX_LAYERS) // int(stated))
    elif None in terms:
        raise WrongModel(f"--moe-layer-freq {stated}: a whole number or a list such as [0]*3+[1]*58 can be read")
    else:
        count = sum(term[1].count("1") * int(term[2] or 1) for term in terms if term)
    return Experts(
        **_numbers(arguments, "experts"),
        intermediate=_number(arguments, "moe-ffn-hidden-size", width),
        layers=count,
        shared_gate="moe-shared-expert-gate" in arguments,
        router_bias=has_bias,
        expert_bias=has_bias,
    )


def _argument_table(kind: str) -> dict[str, Any]:
    return dict(training_systems()["arguments"][kind])


def _has(arguments: Arguments, *names: str) -> bool:
    return bool([name for name in names if name in arguments])


def _numbers(arguments: Arguments, kind: str) -> dict[str, Any]:
    return {key: _number(arguments, *name_and_default) for key, name_and_default in _argument_table(kind).items()}


def _number(arguments: Arguments, name: str, default: int | None = None) -> int:
    value = arguments.get(name, "")
    if not value:
        if default is None:
            raise WrongModel(f"the arguments have no --{name}")
        return default
    if not re.fullmatch(r"-?\d{1,15}", value):
        without_value = f"{value}, which has no value in the script: replace it by its number"
        raise WrongModel(f"--{name} is {without_value if value[0] == '$' else f'{value!r}, not a whole number'}")
    lowest = 0 if name in ("q-lora-rank", "qk-pos-emb-head-dim", "moe-shared-expert-intermediate-size") else 1
    if not lowest <= int(value) <= MAX_SIZE:
        raise WrongModel(f"--{name} is {value}: a number from {lowest} to {MAX_SIZE:,} is possible")
    return int(value)
