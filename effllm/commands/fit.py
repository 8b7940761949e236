"""Estimate the memory of models before a run, and if it fits.

Each part of the memory is an interval with its basis. Weights, gradients and optimizer states are exact. The
interval of activations has the errors on configurations whose tensors were counted. Nothing is downloaded, and
no GPU is needed. With the extra fit, the parameters of a config.json are those of the model that transformers
builds, of any architecture. docs/fit.md has the formulas, their sources and their errors.

\b
Examples:
  effllm fit llama-3.1-8b --gpu h100-80gb
  effllm fit path/to/config.json --gpu a100-80gb --gpus 8 --zero 3
  effllm fit pretrain_llama.sh --gpu h100-80gb           # Megatron
  effllm fit qwen3-8b fsdp.yaml --gpu a100-80gb          # accelerate
  effllm fit deepseek-v3 --mode inference --gpu h200 --gpus 16 --tp 16
  effllm fit gemma-2-9b mistral-7b --gpu rtx4090 --json | jq .models

Exit status: 0 estimated, and fits if a GPU is known; 1 does not fit; 2 wrong use, or no such model; 3 unknown: the
interval contains the memory of the GPU, or the architecture is unknown.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from effllm.commands.fit_sources import FoundModel, StatedSizes, UnknownModel, UnreadableModel, find_source
from effllm.commands.output import complain
from effllm.config.isolated import NoAnswer, ask
from effllm.devices.known.hardware import find_by_typed_words, similar_gpus, usable_bytes
from effllm.memory.changes import DOES_NOT_FIT, FITS, UNCLEAR, fitting_changes, verdict
from effllm.memory.config_json import architecture_of
from effllm.memory.estimate import MeasuredStep, estimate
from effllm.memory.plan import INFERENCE, TRAINING, ImpossiblePlan, MemoryPlan
from effllm.records.plain_text import one_line
from effllm.views.fit_text import GpuMemory, ModelFit, fit_document, fit_lines, wrapped

MAX_GPUS = 10**6
UNKNOWN = 3
DEADLINE_S = 900.0  # an operation takes 0.2 ms without a device; a model of 80 layers has a million of them in a step
_ONE_RANK: dict[str, Any] = dict.fromkeys(("tp", "pp", "cp", "ep"), 1)
_OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")  # Adafactor of torch reads values, which fake tensors do not have
_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed")
_STATUS = {DOES_NOT_FIT: 1, UNCLEAR: UNKNOWN}  # exit statuses of verdicts, the worst first

_MODELS = typer.Argument(metavar="MODEL...", help="config.json, folder, name of the table, Megatron script, or YAML.")
_GPU = typer.Option(metavar="NAME", help="GPU, such as h100-80gb. [default: the GPUs of this machine]")
_GPUS = typer.Option(metavar="N", help="Number of GPUs. [default: those of the layout]")
_PRECISION = typer.Option(
    metavar="P", help="fp32, bf16, fp16, bf16-mixed, fp16-mixed, bf16-master, fp16-master or bf16-zero."
)
_OPTIMIZER = typer.Option(metavar="O", help="adamw, adamw-8bit, adafactor, lion, muon, sgd or sgd-momentum.")
_CHECKPOINTING = typer.Option(metavar="C", help="Activation checkpointing: none, selective or full.")
_KERNELS = typer.Option(metavar="K", help="transformers or megatron (fused kernels).")
_LENGTH = typer.Option(metavar="N", help="Tokens of a sequence; for inference with its answer. [default: 2048]")
_BATCH = typer.Option(metavar="N", help="Sequences of a micro-batch, or served at a time. [default: 1]")
_LORA = typer.Option("--lora", metavar="RANK", help="Rank of LoRA adapters. [default: all weights are trained]")
_TARGETS = typer.Option(metavar="T", help="Adapted matrices: qv, attention or all. [default: all]")
_BITS = typer.Option(metavar="B", help="Bits of quantized weights, 4 or 8 (QLoRA).")
_VOCABULARY = typer.Option(metavar="N", help="Vocabulary of a Megatron script that does not state it.")
_PARAMS = typer.Option(metavar="N", help="Parameters of a model of unknown architecture: 7e9, 671B.")
_ACTIVE = typer.Option(metavar="N", help="Those of them that compute a token. [default: unknown]")
_FUSED = typer.Option("--fused-loss", help="Loss without whole logits, in tiles, as TRL computes it.")
_MEASURE = typer.Option(
    "--measure", help="Also measure a step of one rank with fake tensors; needs transformers, and PEFT for --lora."
)
_SEQUENCE = typer.Option("--sequence-parallel", help="Sequence parallelism beside tensor parallelism.")


@dataclass(frozen=True)
class FitRequest:
    """The arguments of the command."""

    models: Sequence[str]
    mode: str  # training, inference, or "" for both
    gpu: str
    gpus: int | None
    with_measurement: bool
    sizes: StatedSizes
    settings: dict[str, Any]  # of a plan, those that were given


def main(
    models: Annotated[list[str], _MODELS],
    gpu: Annotated[str, _GPU] = "",
    gpus: Annotated[int | None, _GPUS] = None,
    mode: Annotated[str, typer.Option(metavar="MODE", help="training or inference. [default: both]")] = "",
    precision: Annotated[str | None, _PRECISION] = None,
    optimizer: Annotated[str | None, _OPTIMIZER] = None,
    checkpointing: Annotated[str | None, _CHECKPOINTING] = None,
    attention: Annotated[str | None, typer.Option(metavar="A", help="sdpa, flash or eager.")] = None,
    implementation: Annotated[str | None, _KERNELS] = None,
    vocab_size: Annotated[int | None, _VOCABULARY] = None,
    params: Annotated[str, _PARAMS] = "",
    active_params: Annotated[str, _ACTIVE] = "",
    seq_length: Annotated[int | None, _LENGTH] = None,
    micro_batch: Annotated[int | None, _BATCH] = None,
    accumulation: Annotated[int | None, typer.Option(metavar="N", help="Micro-batches of a step. [default: 1]")] = None,
    lora_rank: Annotated[int | None, _LORA] = None,
    lora_targets: Annotated[str | None, _TARGETS] = None,
    base_bits: Annotated[int | None, _BITS] = None,
    fused_loss: Annotated[bool, _FUSED] = False,
    tp: Annotated[int | None, typer.Option(metavar="N", help="Tensor parallelism.")] = None,
    pp: Annotated[int | None, typer.Option(metavar="N", help="Pipeline parallelism.")] = None,
    cp: Annotated[int | None, typer.Option(metavar="N", help="Context parallelism.")] = None,
    ep: Annotated[int | None, typer.Option(metavar="N", help="Expert parallelism.")] = None,
    dp: Annotated[int | None, typer.Option(metavar="N", help="Data parallelism. [default: from --gpus]")] = None,
    zero: Annotated[int | None, typer.Option(metavar="STAGE", help="Stage of ZeRO, 0 to 3.")] = None,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="FSDP with full sharding: the same as --zero 3.")] = False,
    sequence_parallel: Annotated[bool, _SEQUENCE] = False,
    measured: Annotated[bool, _MEASURE] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with bytes.")] = False,
) -> int:
    """Print the estimates; return the exit status."""
    _check_options(mode, fsdp, zero, measured)
    settings = {
        "precision": precision, "optimizer": optimizer, "checkpointing": checkpointing, "attention": attention,
        "implementation": implementation, "seq_length": seq_length, "micro_batch": micro_batch,
        "accumulation": accumulation, "lora_rank": lora_rank, "lora_targets": lora_targets, "base_bits": base_bits,
        "fused_loss": fused_loss, "tp": tp, "pp": pp, "cp": cp, "ep": ep,
        "dp": dp, "zero": 3 if fsdp else zero, "sequence_parallel": sequence_parallel,
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None and value is not False}
    try:
        sizes = StatedSizes(vocab_size, _parameter_count(params), _parameter_count(active_params))
        request = FitRequest(models, mode, gpu, gpus, measured, sizes, given)
        fits, memory = _fits_and_gpu(request)
    except UnknownModel as error:
        return complain("fit", str(error), UNKNOWN)
    except (UnreadableModel, ImpossiblePlan, CannotMeasure) as error:
        return complain("fit", str(error), 2)
    if as_json:
        print(json.dumps(fit_document(fits, memory), indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        for line in fit_lines(fits, memory):
            print(*wrapped(line, width), sep="\n")
    verdicts = {verdict(fit.main_estimate.total, memory.usable_bytes) for fit in fits} if memory is not None else set()
    return next((status for name, status in _STATUS.items() if name in verdicts), 0)


def _parameter_count(text: str) -> int | None:
    """Return the number in a text such as 7e9, 671B or 124M; ``None`` for an empty text."""
    factors = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    number, factor = (text[:-1], factors[text[-1].upper()]) if text[-1:].upper() in factors else (text, 1)
    try:
        count = round(float(number.replace(",", "")) * factor) if text else None
    except (OverflowError, ValueError):
        count = 0
    if count is not None and not 1 <= count <= 10**15:
        raise UnreadableModel(f"{text} is not a number of parameters such as 7e9, 671B or 124M")
    return count


def _check_options(mode: str, fsdp: bool, zero: int | None, measured: bool) -> None:
    if mode not in ("", TRAINING, INFERENCE):
        raise typer.BadParameter(f"{mode} is not training or inference", param_hint="--mode")
    if measured and mode == INFERENCE:
        raise typer.BadParameter("a training step is measured: not with --mode inference", param_hint="--measure")
    if fsdp and zero not in (None, 3):
        raise typer.BadParameter(f"--fsdp is --zero 3, and --zero is {zero}", param_hint="--fsdp")


def _fits_and_gpu(request: FitRequest) -> tuple[list[ModelFit], GpuMemory | None]:
    """Return the estimates of all models, and the GPU with which they are compared."""
    sources = [find_source(text, request.sizes) for text in request.models]
    only_settings = [source for source in sources if source.shape is None]
    models = [source for source in sources if source.shape is not None]
    if not models:
        raise UnreadableModel(f"{request.models[0]} has only settings: also give a MODEL")
    shared_settings = {name: value for source in only_settings for name, value in source.settings.items()}
    shared_notes = tuple(note for source in only_settings for note in source.notes)
    planned = []
    for model in models:
        with _model_in_errors(model, only_settings):
            planned.append(_plan_of(model, request, shared_settings))
    num_gpus = max(plan.gpus for plan, *_ in planned) if request.gpu else request.gpus  # None: all that are here
    gpu = _named_or_smallest_gpu(request.gpu, num_gpus)
    fits = []
    for model, (plan, settings, states_gpus) in zip(models, planned, strict=True):
        with _model_in_errors(model, only_settings):
            fit = _fit_of_plan(model, plan, settings, states_gpus, request, gpu)
        fits.append(replace(fit, notes=(*fit.notes, *shared_notes, *_notes_of_ignored(request, plan))))
    return fits, gpu


@contextmanager
def _model_in_errors(model: FoundModel, settings: Sequence[FoundModel]) -> Iterator[None]:
    """Add the name of the model, and of the files with its settings, to the error of a plan."""
    try:
        yield
    except ImpossiblePlan as error:
        assert model.shape is not None
        raise ImpossiblePlan(f"{', '.join([model.shape.name, *(file.source for file in settings)])}: {error}") from None


def _notes_of_ignored(request: FitRequest, plan: MemoryPlan) -> Iterator[str]:
    if request.mode == INFERENCE:
        names = ("optimizer", "checkpointing", "accumulation", "lora_rank", "fused_loss", "zero", "sequence_parallel")
        if given := [name.replace("_rank", "").replace("_", "-") for name in names if request.settings.get(name)]:
            yield f"no effect on inference: {', '.join(f'--{name}' for name in given)}"
    elif plan.zero and plan.shards == 1:
        yield f"ZeRO {plan.zero} divides nothing with one rank of data parallelism: give --gpus N"


def _plan_of(model: FoundModel, request: FitRequest, shared: dict[str, Any]) -> tuple[MemoryPlan, dict[str, Any], bool]:
    """Return the plan of a model, its settings, and whether these state the number of GPUs.

    Settings are those of its file, of accelerate YAML files (``shared``) and of the options; the last of them counts.
    """
    given = request.settings
    settings = {**model.settings, **shared, **given}
    gpus, global_batch = settings.pop("gpus", None), settings.pop("global_batch", None)
    if request.gpus is not None or "dp" in given:  # then the number in the file does not count
        gpus = request.gpus
    plan = _with_num_gpus(MemoryPlan(**settings), gpus, "dp" in settings)
    if "lora_targets" in given and not plan.lora_rank:
        raise ImpossiblePlan("--lora-targets needs --lora RANK")
    if global_batch and "accumulation" not in settings:
        plan = replace(plan, accumulation=max(global_batch // max(plan.micro_batch * plan.dp, 1), 1))
    return plan, settings, gpus is not None


def _fit_of_plan(
    model: FoundModel,
    plan: MemoryPlan,
    settings: dict[str, Any],
    states_gpus: bool,
    request: FitRequest,
    gpu: GpuMemory | None,
) -> ModelFit:
    """Return the estimates of a plan; if it is too large for the GPU, with the changes with which it fits."""
    assert model.shape is not None
    if request.with_measurement and sys.stderr.isatty():
        print(f"measuring a step of {one_line(model.shape.name)} with fake tensors: some 20 s", file=sys.stderr)
    measured = measure(model.config, plan) if request.with_measurement else None
    training = estimate(model.shape, plan, measured) if request.mode != INFERENCE else None
    inference = estimate(model.shape, _serving_plan(plan, settings)) if request.mode != TRAINING else None
    main_estimate = training or inference
    assert main_estimate is not None
    is_too_large = gpu is not None and verdict(main_estimate.total, gpu.usable_bytes) != FITS
    changes = fitting_changes(main_estimate, gpu.usable_bytes, keeps_gpus=states_gpus) if gpu and is_too_large else []
    notes = (*model.notes, *(measured.notes if measured else ()))
    return ModelFit(model.source, notes, inference, training, tuple(changes), measured)


def _with_num_gpus(plan: MemoryPlan, gpus: int | None, is_dp_given: bool) -> MemoryPlan:
    """Return the plan on ``gpus`` GPUs: data parallelism has those that TP, PP and CP leave; unchanged for ``None``."""
    if gpus is None:
        return plan
    if not 1 <= gpus <= MAX_GPUS:
        raise ImpossiblePlan(f"{gpus:,} GPUs: a number from 1 to {MAX_GPUS:,} is possible")
    copy_gpus = plan.tp * plan.pp * plan.cp  # the GPUs of one copy of the model
    if gpus % copy_gpus:
        raise ImpossiblePlan(f"TP x PP x CP = {copy_gpus} does not divide {gpus} GPUs")
    if is_dp_given and plan.dp * copy_gpus != gpus:
        raise ImpossiblePlan(f"TP x PP x CP x DP = {plan.dp * copy_gpus}, but --gpus is {gpus}")
    return replace(plan, dp=gpus // copy_gpus)


def _serving_plan(plan: MemoryPlan, settings: dict[str, Any]) -> MemoryPlan:
    """Return the plan of inference on the same GPUs: weights in the precision of the matrix products."""
    precision, numbers = plan.precision, plan.numbers
    if numbers.bytes_per_weight > numbers.bytes_per_activation or "precision" not in settings:
        precision = "fp16" if precision.startswith("fp16") else "bf16"
    # Adapters of LoRA are merged into a base that is not quantized any more.
    return replace(
        plan, mode=INFERENCE, precision=precision, lora_rank=0, zero=0, accumulation=1, checkpointing="none",
        base_bits=0 if plan.lora_rank else plan.base_bits, fused_loss=False,
        sequence_parallel=False,
    )  # fmt: skip


class CannotMeasure(ValueError):
    """A plan or a model of which no step can be measured, with the reason."""


def measure(config: Mapping[str, Any] | None, plan: MemoryPlan) -> MeasuredStep:
    """Return the bytes of a training step of one rank, before ZeRO divides its tensors; no GPU and weights are needed.

    `effllm.memory.measure_child` builds the model, with the adapters of PEFT, and trains it.
    """
    _check_measurable(config, plan)
    assert config is not None
    try:
        fields = ask("effllm.memory.measure_child", "measure", {"config": config, "plan": asdict(plan)}, DEADLINE_S)
    except NoAnswer as error:
        raise CannotMeasure(f"--measure: {error}") from None
    return MeasuredStep(**{**fields, "notes": tuple(fields["notes"])})


def _check_measurable(config: Mapping[str, Any] | None, plan: MemoryPlan) -> None:
    if config is None or not (architecture_of(config) or config.get("model_type")):
        raise CannotMeasure("--measure needs a config of Hugging Face with architectures or a model_type")
    if plan != replace(plan, fused_loss=False, implementation="transformers", **_ONE_RANK):  # any of these differs
        raise CannotMeasure(
            "--measure is for one rank with the kernels of transformers: no TP, PP, CP, EP or fused loss"
        )
    if plan.checkpointing == "selective":
        raise CannotMeasure("--measure has the checkpointing none and full")
    if plan.optimizer not in _OPTIMIZERS or plan.precision not in _PRECISIONS:
        raise CannotMeasure(f"--measure has the optimizers {', '.join(_OPTIMIZERS)} and {', '.join(_PRECISIONS)}")


def _named_or_smallest_gpu(name: str, count: int | None) -> GpuMemory | None:
    """Return the named GPU, or the smallest GPU of this machine; ``None`` without either."""
    if not name:
        return _smallest_gpu_here(count)
    row = find_by_typed_words(name)
    if row is None:
        raise ImpossiblePlan(
            f"the table has no GPU {name}: give a name such as {', '.join(similar_gpus(name)) or 'h100-80gb'}"
        )
    return GpuMemory(row.names[0], count or 1, row.memory_bytes or 0, usable_bytes(row), "hardware table")


def _smallest_gpu_here(count: int | None) -> GpuMemory | None:
    import pynvml

    gpus: list[tuple[float, str]] = []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name = pynvml.nvmlDeviceGetName(handle)
                memory = float(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
                gpus.append((memory, name.decode() if isinstance(name, bytes) else str(name)))
        finally:
            pynvml.nvmlShutdown()
    if not gpus:
        return None
    memory, name = min(gpus)
    return GpuMemory(name, count or len(gpus), memory, memory, "found here")
