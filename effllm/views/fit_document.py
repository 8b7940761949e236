"""The JSON document of ``effllm fit``; its names are stable, and docs/fit.md describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from effllm.memory.changes import FittingChange, verdict
from effllm.memory.estimate import ByteRange, MemoryEstimate
from effllm.views.fit_text import GpuMemory, ModelFit

SCHEMA = 1


def fit_document(fits: Sequence[ModelFit], gpu: GpuMemory | None) -> dict[str, Any]:
    """Return all estimates; sizes are whole bytes."""
    return {
        "schema": SCHEMA,
        "gpu": None if gpu is None else _gpu(gpu),
        "models": [_model(fit, gpu) for fit in fits],
    }


def _gpu(gpu: GpuMemory) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "count": gpu.count,
        "memory_bytes": round(gpu.memory_bytes),
        "usable_bytes": round(gpu.usable_bytes),
        "source": gpu.source,
    }


def _model(fit: ModelFit, gpu: GpuMemory | None) -> dict[str, Any]:
    found = fit.any
    return {
        "name": found.shape.name,
        "architecture": found.shape.architecture,
        "is_upper_bound": found.shape.is_upper_bound,
        "source": fit.source,
        "notes": list(fit.notes),
        "parameters": found.parameters.total,
        "active_parameters": found.parameters.active,
        "inference": _estimate(fit.inference, gpu),
        "training": _estimate(fit.training, gpu),
        "measured": fit.measured,
        "changes": [_change(one) for one in fit.changes],
    }


def _estimate(found: MemoryEstimate | None, gpu: GpuMemory | None) -> dict[str, Any] | None:
    if found is None:
        return None
    parts = {
        part.name.replace(" ", "_"): {
            **_range(part.bytes),
            "largest": None if part.largest is None else round(part.largest),
            "basis": part.basis,
        }
        for part in found.parts
    }
    return {
        "plan": asdict(found.plan),
        "gpus": found.plan.gpus,
        "trained_parameters": round(found.trained) if found.plan.is_training else None,
        "moment": found.moment,
        "parts": parts,
        "total": _range(found.total),
        "verdict": None if gpu is None else verdict(found.total, gpu.usable_bytes),
    }


def _change(change: FittingChange) -> dict[str, Any]:
    return {
        "options": change.options,
        "costs": list(change.costs),
        "gpus": change.plan.gpus,
        "total": _range(change.total),
    }


def _range(size: ByteRange) -> dict[str, int]:
    return {"low": round(size.low), "expected": round(size.expected), "high": round(size.high)}
