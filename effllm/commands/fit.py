"""``effllm fit``: the memory of models before a run, and whether they fit."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import typer

from effllm.commands.fit_sources import FoundModel, StatedSizes, UnknownModel, UnreadableModel, find
from effllm.commands.output import complain
from effllm.config.isolated import NoAnswer, ask
from effllm.devices.known.hardware import find_gpu, similar_gpus, usable_bytes
from effllm.memory.changes import DOES_NOT_FIT, FITS, UNCLEAR, fitting_changes, verdict
from effllm.memory.config_fields import architecture_of
from effllm.memory.estimate import MeasuredStep, estimate
from effllm.memory.plan import INFERENCE, PRECISIONS, TRAINING, ImpossiblePlan, MemoryPlan
from effllm.records.plain_text import one_line
from effllm.views.fit_text import GpuMemory, ModelFit, fit_document, fit_lines, wrapped

MAX_GPUS = 10**6
UNKNOWN = 3
DEADLINE_S = 900.0  # an operation takes 0.2 ms without a device; a model of 80 layers has a million of them in a step
_ONE_RANK: dict[str, Any] = dict.fromkeys(("tp", "pp", "cp", "ep"), 1)
_OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")  # Adafactor of torch reads values, which fake tensors do not have
_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed")
_STATUS = {DOES_NOT_FIT: 1, UNCLEAR: UNKNOWN}  # the exit status of the worst model


@dataclass(frozen=True)
class FitRequest:
    """The arguments of the command."""

    models: Sequence[str]
    mode: str  # training, inference, or "" for both
    gpu: str
    gpus: int | None
    measured: bool
    sizes: StatedSizes
    settings: dict[str, Any]  # of a plan, those that were given


def main(
    models: Sequence[str],
    mode: str,
    gpu: str,
    gpus: int | None,
    measured: bool,
    vocab_size: int | None,
    params: str,
    active_params: str,
    zero: int | None,
    fsdp: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Print the estimates; return the exit status. The other settings of a plan are None or False if not given."""
    _check(mode, fsdp, zero, measured)
    settings["zero"] = 3 if fsdp else zero
    given = {name: value for name, value in settings.items() if value is not None and value is not False}
    try:
        sizes = StatedSizes(vocab_size, _count(params), _count(active_params))
        request = FitRequest(models, mode, gpu, gpus, measured, sizes, given)
        fits, memory = _estimates(request)
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
    words = {verdict(fit.any.total, memory.usable_bytes) for fit in fits} if memory is not None else set()
    return next((status for word, status in _STATUS.items() if word in words), 0)


def _count(text: str) -> int | None:
    """Return a number such as 7e9, 671B or 124M.

    Raises:
        UnreadableModel: the text is no number from 1 on.
    """
    factors = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    number, factor = (text[:-1], factors[text[-1].upper()]) if text[-1:].upper() in factors else (text, 1)
    try:
        count = round(float(number.replace(",", "")) * factor) if text else None
    except (OverflowError, ValueError):
        count = 0
    if count is not None and not 1 <= count <= 10**15:
        raise UnreadableModel(f"{text} is not a number of parameters such as 7e9, 671B or 124M")
    return count


def _check(mode: str, fsdp: bool, zero: int | None, measured: bool) -> None:
    """Raise an error of wrong use if options contradict each other."""
    if mode not in ("", TRAINING, INFERENCE):
        raise typer.BadParameter(f"{mode} is not training or inference", param_hint="--mode")
    if measured and mode == INFERENCE:
        raise typer.BadParameter("a training step is measured: not with --mode inference", param_hint="--measure")
    if fsdp and zero not in (None, 3):
        raise typer.BadParameter(f"--fsdp is --zero 3, and --zero is {zero}", param_hint="--fsdp")


def _estimates(request: FitRequest) -> tuple[list[ModelFit], GpuMemory | None]:
    found = [find(text, request.sizes) for text in request.models]
    only_settings = [one for one in found if one.shape is None]
    models = [one for one in found if one.shape is not None]
    if not models:
        raise UnreadableModel(f"{request.models[0]} has only settings: also give a MODEL")
    shared = {name: value for one in only_settings for name, value in one.settings.items()}
    notes = tuple(note for one in only_settings for note in one.notes)
    planned = []
    for one in models:
        with _named(one, only_settings):
            planned.append(_planned(one, request, shared))
    gpu = _gpu(request.gpu, max(plan.gpus for plan, *_ in planned) if request.gpu else request.gpus)
    fits = []
    for one, plan in zip(models, planned, strict=True):
        with _named(one, only_settings):
            fit = _fit(one, *plan, request, gpu)
        fits.append(replace(fit, notes=(*fit.notes, *notes, *_ignored(request, plan[0]))))
    return fits, gpu


@contextmanager
def _named(model: FoundModel, settings: Sequence[FoundModel]) -> Iterator[None]:
    """Add the name of the model, and of the files with its settings, to the error of a plan."""
    try:
        yield
    except ImpossiblePlan as error:
        assert model.shape is not None
        raise ImpossiblePlan(f"{', '.join([model.shape.name, *(one.source for one in settings)])}: {error}") from None


def _ignored(request: FitRequest, plan: MemoryPlan) -> Iterator[str]:
    """Yield notes of settings that have no effect."""
    if request.mode == INFERENCE:
        names = ("optimizer", "checkpointing", "accumulation", "lora_rank", "fused_loss", "zero", "sequence_parallel")
        given = [name.replace("_rank", "").replace("_", "-") for name in names if request.settings.get(name)]
        if given:
            yield f"no effect on inference: {', '.join(f'--{name}' for name in given)}"
    elif plan.zero and plan.shards == 1:
        yield f"ZeRO {plan.zero} divides nothing with one rank of data parallelism: give --gpus N"


def _planned(found: FoundModel, request: FitRequest, shared: dict[str, Any]) -> tuple[MemoryPlan, dict[str, Any], bool]:
    """Return the plan of a model, its settings, and whether these state the number of GPUs.

    Settings are those of its file, of an accelerate YAML and of the options.
    """
    given = request.settings
    settings = {**found.settings, **shared, **given}
    stated, batch = settings.pop("gpus", None), settings.pop("global_batch", None)
    gpus = request.gpus if request.gpus is not None else None if "dp" in given else stated
    plan = _laid_out(MemoryPlan(**settings), gpus, "dp" in settings)
    if "lora_targets" in given and not plan.lora_rank:
        raise ImpossiblePlan("--lora-targets needs --lora RANK")
    if batch and "accumulation" not in settings:
        plan = replace(plan, accumulation=max(batch // max(plan.micro_batch * plan.dp, 1), 1))
    return plan, settings, gpus is not None


def _fit(
    found: FoundModel,
    plan: MemoryPlan,
    settings: dict[str, Any],
    keeps_gpus: bool,
    request: FitRequest,
    gpu: GpuMemory | None,
) -> ModelFit:
    assert found.shape is not None
    if request.measured and sys.stderr.isatty():
        print(f"measuring a step of {one_line(found.shape.name)} with fake tensors: some 20 s", file=sys.stderr)
    measured = measure(found.config, plan) if request.measured else None
    training = estimate(found.shape, plan, measured) if request.mode != INFERENCE else None
    inference = estimate(found.shape, _serving_plan(plan, settings)) if request.mode != TRAINING else None
    main_one = training or inference
    assert main_one is not None
    is_too_large = gpu is not None and verdict(main_one.total, gpu.usable_bytes) != FITS
    changes = fitting_changes(main_one, gpu.usable_bytes, keeps_gpus=keeps_gpus) if gpu and is_too_large else []
    notes = (*found.notes, *(measured.notes if measured else ()))
    return ModelFit(found.source, notes, inference, training, tuple(changes), measured)


def _laid_out(plan: MemoryPlan, gpus: int | None, is_dp_given: bool) -> MemoryPlan:
    """Return the plan on a number of GPUs: those that tensor, pipeline and context parallelism leave are for data."""
    if gpus is None:
        return plan
    if not 1 <= gpus <= MAX_GPUS:
        raise ImpossiblePlan(f"{gpus:,} GPUs: a number from 1 to {MAX_GPUS:,} is possible")
    model = plan.tp * plan.pp * plan.cp
    if gpus % model:
        raise ImpossiblePlan(f"TP x PP x CP = {model} does not divide {gpus} GPUs")
    if is_dp_given and plan.dp * model != gpus:
        raise ImpossiblePlan(f"TP x PP x CP x DP = {plan.dp * model}, but --gpus is {gpus}")
    return replace(plan, dp=gpus // model)


def _serving_plan(plan: MemoryPlan, settings: dict[str, Any]) -> MemoryPlan:
    """Return the plan of inference: weights in the precision of the products, on the same GPUs."""
    precision = plan.precision
    if PRECISIONS[precision].weights > PRECISIONS[precision].compute or "precision" not in settings:
        precision = "fp16" if precision.startswith("fp16") else "bf16"
    return replace(
        plan, mode=INFERENCE, precision=precision, lora_rank=0, zero=0, accumulation=1, checkpointing="none",
        base_bits=0 if plan.lora_rank else plan.base_bits, base_keeps_inputs=False, fused_loss=False,
        sequence_parallel=False,
    )  # fmt: skip


# --- a step, measured with fake tensors: no GPU and no weights ---


class CannotMeasure(ValueError):
    """A plan or a model of which no step can be measured, with the reason."""


def measure(config: Mapping[str, Any] | None, plan: MemoryPlan) -> MeasuredStep:
    """Return the bytes of a training step of one rank, before ZeRO divides its tensors.

    `effllm.memory.measure_child` builds the model, with the adapters of PEFT, and trains it.

    Raises:
        CannotMeasure: the plan needs another trainer, a package is missing, or the model does not run.
    """
    _check_measured(config, plan)
    assert config is not None
    try:
        found = ask("effllm.memory.measure_child", "measure", {"config": config, "plan": asdict(plan)}, DEADLINE_S)
    except NoAnswer as error:
        raise CannotMeasure(f"--measure: {error}") from None
    return MeasuredStep(**{**found, "notes": tuple(found["notes"])})


def _check_measured(config: Mapping[str, Any] | None, plan: MemoryPlan) -> None:
    if config is None or not (architecture_of(config) or config.get("model_type")):
        raise CannotMeasure("--measure needs a config of Hugging Face with architectures or a model_type")
    if plan != replace(plan, fused_loss=False, base_keeps_inputs=False, implementation="transformers", **_ONE_RANK):
        raise CannotMeasure(
            "--measure is for one rank with the kernels of transformers: no TP, PP, CP, EP, fused loss or kept inputs"
        )
    if plan.checkpointing == "selective":
        raise CannotMeasure("--measure has the checkpointing none and full")
    if plan.optimizer not in _OPTIMIZERS or plan.precision not in _PRECISIONS:
        raise CannotMeasure(f"--measure has the optimizers {', '.join(_OPTIMIZERS)} and {', '.join(_PRECISIONS)}")


# --- GPUs ----------------------------------------------------------------------------------------


def _gpu(name: str, count: int | None) -> GpuMemory | None:
    """Return the named GPU, or the smallest GPU of this machine, or None."""
    if not name:
        return _found_gpu(count)
    row = find_gpu(name)
    if row is None:
        raise ImpossiblePlan(
            f"the table has no GPU {name}: give a name such as {', '.join(similar_gpus(name)) or 'h100-80gb'}"
        )
    return GpuMemory(row.names[0], count or 1, row.memory_bytes or 0, usable_bytes(row), "hardware table")


def _found_gpu(count: int | None) -> GpuMemory | None:
    import pynvml

    found: list[tuple[float, str]] = []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name = pynvml.nvmlDeviceGetName(handle)
                memory = float(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
                found.append((memory, name.decode() if isinstance(name, bytes) else str(name)))
        finally:
            pynvml.nvmlShutdown()
    if not found:
        return None
    memory, name = min(found)
    return GpuMemory(name, count or len(found), memory, memory, "found here")
