"""The results of `EnergyTrackingCallback`: entries of its histories, the final values, the report, the files."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from effllm.instruments._energy import J_PER_WH, Baseline, SpanReadings, energy_amounts
from effllm.instruments._files import write_json
from effllm.instruments._number import number
from effllm.instruments.energy import EnergyMetrics
from effllm.records.spans import NAN

#: The world's mean carbon intensity that some trackers assume; used only for ``carbon_intensity="document"``.
DOCUMENT_KG_PER_KWH = 0.5
FILES = ("energy_step_history", "energy_interval_history", "energy_monitoring_summary", "robust_gpu_energy")

_LABELS = {
    "en": (
        "FINAL ENERGY REPORT", "Duration", "Steps", "Epochs", "Total energy", "Mean power", "Energy per step",
        "Energy per epoch", "Efficiency score", "Estimated carbon footprint", "not measured",
    ),
    "pt": (
        "RELATÓRIO ENERGÉTICO FINAL", "Duração", "Steps", "Épocas", "Energia total", "Potência média",
        "Energia por step", "Energia por época", "Score de eficiência", "Pegada de carbono estimada", "não medido",
    ),
}  # fmt: skip
LANGUAGES = tuple(_LABELS)


def step_logs(steps: SpanReadings, step: int) -> dict[str, float]:
    """Return the values of the steps since the last log; ``step`` is the last of these steps."""
    return _measured_logs(
        {
            "energy_step/power_avg_w": steps.power_w,
            "energy_step/energy_per_step_wh": steps.wh_per_span,
            "energy_step/energy_efficiency": steps.efficiency,
            "energy_step/temperature_avg_c": steps.temperature_c,
        },
        "energy_step/step",
        step,
    )


def interval_logs(steps: SpanReadings, step: int) -> dict[str, float]:
    """Return the values of an interval; ``step`` is its last step."""
    return _measured_logs(
        {
            "energy_interval/power_avg_w": steps.power_w,
            "energy_interval/energy_consumed_wh": steps.joules / J_PER_WH,
            "energy_interval/efficiency_wh_per_step": steps.wh_per_span,
            "energy_interval/temperature_avg_c": steps.temperature_c,
            "energy_interval/gpu_utilization_avg_percent": steps.utilization * 100.0,
        },
        "energy_interval/step",
        step,
    )


def _measured_logs(values: dict[str, float], step_key: str, step: int) -> dict[str, float]:
    measured = {name: value for name, value in values.items() if not math.isnan(value)}
    return {**measured, step_key: step} if measured else {}


def final_values(steps: SpanReadings, epochs: float, intensity_kg_per_kwh: float | None) -> dict[str, float]:
    """Return the final values; ``nan`` for an unmeasured value, and for CO2 without a carbon intensity."""
    kwh = steps.joules / J_PER_WH / 1000.0
    co2_kg = NAN if intensity_kg_per_kwh is None else kwh * intensity_kg_per_kwh
    return {
        "final_energy/total_energy_consumed_kwh": kwh,
        "final_energy/energy_per_step_wh": steps.wh_per_span,
        "final_energy/energy_per_epoch_kwh": kwh / epochs if epochs > 0 else NAN,
        "final_energy/energy_efficiency_score": steps.efficiency,
        "final_energy/carbon_footprint_estimate_kg": co2_kg,
    }


def history_entry(metrics: EnergyMetrics, steps: SpanReadings, baseline: Baseline) -> dict[str, Any]:
    """Return an entry of a history: the fields of the metrics, the amounts of energy, the number of steps."""
    of_steps = {"steps": steps.num_spans, "energy_efficiency": steps.efficiency}
    return {**dataclasses.asdict(metrics), **energy_amounts(steps, baseline), **of_steps}


def report(steps: SpanReadings, epochs: float, intensity_kg_per_kwh: float | None, language: str = "en") -> str:
    """Return the final report; a quantity that was not measured has a line without a number."""
    title, *labels, missing = _LABELS[language]
    final = final_values(steps, epochs, intensity_kg_per_kwh)
    values = [
        f"{steps.duration_s:.0f}s ({steps.duration_s / 3600.0:.2f}h)",
        f"{steps.num_spans}",
        _format_measured(epochs, "{:.2f}", missing),
        _format_measured(final["final_energy/total_energy_consumed_kwh"], "{:.4f} kWh", missing),
        _format_measured(steps.power_w, "{:.1f}W", missing),
        _format_measured(final["final_energy/energy_per_step_wh"], "{:.4f}Wh", missing),
        _format_measured(final["final_energy/energy_per_epoch_kwh"], "{:.4f}kWh", missing),
        _format_measured(final["final_energy/energy_efficiency_score"], "{:.4f}", missing),
        _format_measured(final["final_energy/carbon_footprint_estimate_kg"], "{:.6f}kg CO2", missing),
    ]
    if intensity_kg_per_kwh is None:  # without an intensity there is no estimate, and no line
        labels, values = labels[:-1], values[:-1]
    return "\n".join([f"{title}:", *(f"• {label}: {value}" for label, value in zip(labels, values, strict=True))])


def _format_measured(value: float, form: str, missing: str) -> str:
    return missing if math.isnan(value) else form.format(value)


def checked_intensity(kg_per_kwh: float | None, name: str | None) -> float | None:
    """Return the carbon intensity; without an argument return ``None``, which means no estimate.

    Raises:
        ValueError: both arguments are given, the number is negative or not finite, or the name is unknown.
    """
    if kg_per_kwh is not None and name is not None:
        raise ValueError("carbon_intensity_kg_per_kwh and carbon_intensity cannot be used together")
    if name is not None:
        if name != "document":
            raise ValueError(f"carbon_intensity={name!r} must be 'document' (0.5 kg/kWh)")
        return DOCUMENT_KG_PER_KWH
    given = None if kg_per_kwh is None else number(kg_per_kwh)
    if kg_per_kwh is not None and (given is None or not 0 <= given < math.inf):
        raise ValueError(f"carbon_intensity_kg_per_kwh={kg_per_kwh!r} must be a number of at least 0")
    return given


def write_files(folder: str, bodies: tuple[Any, Any, Any, Any]) -> list[Path]:
    """Write the four files, named by the present time; return their paths.

    Raises:
        OSError: a file cannot be written.
    """
    now = time.strftime("%Y%m%d_%H%M%S")
    paths = [Path(folder) / f"{name}_{now}.json" for name in FILES]
    return [write_json(path, body) for path, body in zip(paths, bodies, strict=True)]
