"""The texts of ``effllm fit``: tables, parts of a plan, changes that make it fit, and the JSON document."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from effllm.memory.changes import DOES_NOT_FIT, FITS, FittingChange, verdict
from effllm.memory.estimate import ByteRange, MeasuredStep, MemoryEstimate, total_of
from effllm.memory.plan import MemoryPlan
from effllm.records.plain_text import one_line

SCHEMA = 1  # of the JSON document, whose names are stable; docs/fit.md describes them
GB, GIB = 1e9, 2.0**30
BASIS_AT = 52  # column of the basis of a part
SIGNS = {FITS: "✓", "does not fit": "✗", "unclear": "?"}


@dataclass(frozen=True)
class GpuMemory:
    """The GPUs of a plan."""

    name: str
    count: int
    memory_bytes: float
    usable_bytes: float
    source: str  # found here, or the hardware table


@dataclass(frozen=True)
class ModelFit:
    """A model with its estimates."""

    source: str  # file or address of the model's configuration
    notes: tuple[str, ...]
    inference: MemoryEstimate | None
    training: MemoryEstimate | None
    changes: tuple[FittingChange, ...]  # of the training, or of the inference alone
    measured: MeasuredStep | None = None

    @property
    def main_estimate(self) -> MemoryEstimate:
        estimate = self.training or self.inference
        assert estimate is not None
        return estimate


def fit_lines(fits: Sequence[ModelFit], gpu: GpuMemory | None) -> Iterator[str]:
    """Yield the lines of the command's output."""
    yield from requirement_lines(fits)
    if gpu:
        yield ""
        yield from compatibility_lines(fits, gpu)
    for fit in fits:
        for estimate in (fit.inference, fit.training):
            if estimate and (fit.training is None or estimate is fit.training):
                yield ""
                yield from _part_lines(estimate)
        if fit.measured and fit.training:
            yield from _measured_lines(fit.measured, fit.training)
        yield from (f"note: {one_line(note)}" for note in fit.notes)
        if gpu:
            yield from _change_lines(fit, gpu)


def wrapped(line: str, width: int) -> list[str]:
    """Return a line in parts of at most a width; the basis of a part continues in its column."""
    if len(line) <= width:
        return [line]
    # A line of a part has a number and two blanks before its basis.
    is_part = len(line) > BASIS_AT and line[BASIS_AT - 2 : BASIS_AT] == "  " and line[BASIS_AT - 3].isdecimal()
    indent = BASIS_AT if is_part else len(line) - len(line.lstrip()) + 2
    return textwrap.wrap(line, max(width, indent + 20), subsequent_indent=" " * indent, break_on_hyphens=False)


def requirement_lines(fits: Sequence[ModelFit]) -> Iterator[str]:
    """Yield the table of requirements: one row for each model."""
    yield "Model Memory Requirements of the GPU with the highest need (1 GB = 10^9 bytes)"
    yield ""
    first = fits[0]
    heads = [_column_title(first.inference), _column_title(first.training)]
    yield f"{'Model':<24} {'Parameters':>16}  {heads[0]:<25} {heads[1]}".rstrip()
    for fit in fits:
        cells = [_range_text(estimate.total) if estimate else "" for estimate in (fit.inference, fit.training)]
        name = one_line(fit.main_estimate.shape.name)[:24]
        yield f"{name:<24} {fit.main_estimate.parameters.total:>16,}  {cells[0]:<25} {cells[1]}".rstrip()
        if fit.main_estimate.parameters.active not in (None, fit.main_estimate.parameters.total):
            yield f"{'  of these active':<24} {fit.main_estimate.parameters.active:>16,}  (memory needs all parameters)"


def compatibility_lines(fits: Sequence[ModelFit], gpu: GpuMemory) -> Iterator[str]:
    """Yield the table of compatibility: a row for each model and use."""
    yield (
        f"Compatibility with {gpu.count} x {one_line(gpu.name)}: {gpu.memory_bytes / GB:.1f} GB = "
        f"{gpu.memory_bytes / GIB:.1f} GiB, {gpu.usable_bytes / GB:.1f} GB usable ({gpu.source})"
    )
    yield ""
    yield f"{'Model':<36} {'Required':<25} Status"
    for fit in fits:
        for estimate in (fit.inference, fit.training):
            if estimate:
                status = verdict(estimate.total, gpu.usable_bytes)
                name = f"{one_line(estimate.shape.name)[:24]} ({estimate.plan.mode})"
                yield f"{name:<36} {_range_text(estimate.total):<25} {SIGNS[status]} {status}"


def _part_lines(estimate: MemoryEstimate) -> Iterator[str]:
    yield f"{one_line(estimate.shape.name)}: {plan_text(estimate.plan)}"
    yield f"Peak at: {estimate.moment}"
    yield ""
    yield f"{'part':<22} {'low':>8} {'expected':>9} {'high':>8}  GB, and basis"
    for part in estimate.parts:
        if part.bytes.high or part.largest:
            yield f"{part.name:<22} {_range_cells(part.bytes)}  {part.basis}"
            if part.largest and part.largest > 1.01 * part.bytes.high:  # by more than rounding
                yield f"{'':<22} up to {part.largest / GB:.2f} GB later in the step, after the activations are freed"
    total = estimate.total
    if total.high == math.inf:
        yield f"{'total':<22} {_range_cells(total)}  at least; in GiB: {total.low / GIB:.1f}"
        return
    yield f"{'total':<22} {_range_cells(total)}  90 % interval; in GiB: {total.low / GIB:.1f} to {total.high / GIB:.1f}"
    if total.high > total_of(part.bytes for part in estimate.parts).high:
        yield "the high limit is at the optimizer step: foreach optimizers allocate a copy of the weights"
    yield f"dominant: {', '.join(_dominant_parts(estimate))}"


def _measured_lines(measured: MeasuredStep, estimate: MemoryEstimate) -> Iterator[str]:
    """Yield the measured step and the estimate of the same parts; parts of a GPU, such as its context, are left out."""
    names = ("weights", "gradients", "optimizer states", "activations", "logits", "optimizer workspace")
    same_parts = [part for part in estimate.parts if part.name in names]
    sizes = _measured_sizes(measured)
    parts = ", ".join(f"{name.replace('_', ' ')} {size / GB:.2f}" for name, size in sizes.items() if name != "peak")
    yield f"measured with fake tensors on one rank, GB: peak {measured.peak / GB:.2f} ({parts})"
    if estimate.shape.has_known_layers and estimate.plan.zero == 0:
        yield f"estimate of the same parts, GB: {_range_text(total_of(part.bytes for part in same_parts))}"


def _measured_sizes(measured: MeasuredStep) -> dict[str, int]:
    return {name: size for name, size in measured._asdict().items() if name not in ("has_other_kernels", "notes")}


def _dominant_parts(estimate: MemoryEstimate) -> Iterator[str]:
    parts = sorted(estimate.parts, key=lambda part: -part.bytes.expected)[:3]
    for part in parts:
        share = part.bytes.expected / max(estimate.total.expected, 1.0)
        if share >= 0.05:
            yield f"{part.name} {100 * share:.0f} %"


def _change_lines(fit: ModelFit, gpu: GpuMemory) -> Iterator[str]:
    status = verdict(fit.main_estimate.total, gpu.usable_bytes)
    yield f"{fit.main_estimate.plan.mode}: {SIGNS[status]} {status}"
    if status == FITS:
        return
    if not fit.main_estimate.shape.has_known_layers:
        if fit.main_estimate.total.high < math.inf:
            yield "without formulas no changes are computed: measure --checkpointing full, --lora or a smaller batch"
        elif status == DOES_NOT_FIT:
            yield "what the parameters need does not fit: more GPUs (--gpus N --zero 3), or a smaller --precision"
        else:
            yield "the memory of the activations is unknown: --measure counts that of a training step"
        return
    if not fit.changes:
        yield "no combination of up to three changes makes it fit: use more GPUs, or a smaller model"
        return
    yield "changes that make it fit, the cheapest first:"
    for change in fit.changes:
        yield f"  {change.options:<44} {_range_text(change.total)}"
        yield f"    cost: {'; '.join(change.costs)}"


def plan_text(plan: MemoryPlan) -> str:
    """Return a plan as words."""
    words = [plan.mode, plan.precision]
    if plan.base_bits:
        words.append(f"base of {plan.base_bits} bits")
    if plan.is_training:
        words += [plan.optimizer, f"checkpointing {plan.checkpointing}"]
        words += [f"LoRA of rank {plan.lora_rank} ({plan.lora_targets})"] if plan.lora_rank else []
        words += [f"{plan.micro_batch} x {plan.seq_length} tokens", f"accumulation {plan.accumulation}"]
        words += ["fused loss"] if plan.fused_loss else []
        words += [f"ZeRO {plan.zero}"] if plan.zero else []
    else:
        words.append(f"{plan.micro_batch} sequences of {plan.seq_length} tokens")
    words.append(f"attention {plan.attention}")
    sizes = {"TP": plan.tp, "PP": plan.pp, "CP": plan.cp, "EP": plan.ep, "DP": plan.dp}
    words += [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join(words)


def _column_title(estimate: MemoryEstimate | None) -> str:
    if estimate is None:
        return ""
    plan = estimate.plan
    if not plan.is_training:
        return f"Inference ({plan.precision})"
    return f"Training ({plan.precision}, {'LoRA' if plan.lora_rank else plan.optimizer})"


def _range_text(total: ByteRange) -> str:
    if total.high == math.inf:
        return f"at least {total.low / GB:,.1f} GB"
    digits = 1 if total.high < 1000 * GB else 0
    low, expected, high = (f"{size / GB:,.{digits}f}" for size in total)
    return f"{expected} GB ({low}-{high})"


def _range_cells(size: ByteRange) -> str:
    if size.high == math.inf:
        return f"{size.low / GB:>8.2f} {'unknown':>9} {'unknown':>8}"
    return f"{size.low / GB:>8.2f} {size.expected / GB:>9.2f} {size.high / GB:>8.2f}"


def fit_document(fits: Sequence[ModelFit], gpu: GpuMemory | None) -> dict[str, Any]:
    """Return all estimates; sizes are whole bytes."""
    gpu_fields = None
    if gpu is not None:
        sizes = {"memory_bytes": round(gpu.memory_bytes), "usable_bytes": round(gpu.usable_bytes)}
        gpu_fields = {**asdict(gpu), **sizes}
    return {"schema": SCHEMA, "gpu": gpu_fields, "models": [_model_document(fit, gpu) for fit in fits]}


def _model_document(fit: ModelFit, gpu: GpuMemory | None) -> dict[str, Any]:
    estimate = fit.main_estimate
    return {
        "name": estimate.shape.name,
        "architecture": estimate.shape.architecture,
        "has_known_layers": estimate.shape.has_known_layers,
        "source": fit.source,
        "notes": list(fit.notes),
        "parameters": estimate.parameters.total,
        "active_parameters": estimate.parameters.active,
        "inference": _estimate_document(fit.inference, gpu),
        "training": _estimate_document(fit.training, gpu),
        "measured": fit.measured and _measured_sizes(fit.measured),
        "changes": [
            {
                "options": change.options,
                "costs": list(change.costs),
                "gpus": change.plan.gpus,
                "total": _range_document(change.total),
            }
            for change in fit.changes
        ],
    }


def _estimate_document(estimate: MemoryEstimate | None, gpu: GpuMemory | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    parts = {
        part.name.replace(" ", "_"): {
            **_range_document(part.bytes),
            "largest": None if part.largest is None else round(part.largest),
            "basis": part.basis,
        }
        for part in estimate.parts
    }
    return {
        "plan": asdict(estimate.plan),
        "gpus": estimate.plan.gpus,
        "trained_parameters": round(estimate.trained) if estimate.plan.is_training else None,
        "moment": estimate.moment,
        "parts": parts,
        "total": _range_document(estimate.total),
        "verdict": None if gpu is None else verdict(estimate.total, gpu.usable_bytes),
    }


def _range_document(size: ByteRange) -> dict[str, int | None]:
    return {name: round(value) if math.isfinite(value) else None for name, value in size._asdict().items()}
