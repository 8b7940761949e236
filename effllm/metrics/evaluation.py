"""The values and errors of all metrics for a report or a summary."""

from __future__ import annotations

from msgspec.structs import replace

from effllm.metrics.table import METRICS, Formula
from effllm.records.job import ClusterTotals

#: Maximum relative rounding error of a float.
ROUNDING = 1e-9


def evaluate(run: ClusterTotals, window: ClusterTotals, job: ClusterTotals) -> dict[str, float]:
    """Return the measured values of a window, for each metric and base: tag -> value."""
    bases = {"run": run, "window": window, "job": job}
    shown = [(entry, base) for entry in METRICS.values() if entry.in_windows for base in entry.bases]
    values = {entry.tag(base): entry.formula(bases[base]) for entry, base in shown}
    return {tag: value for tag, value in values.items() if value is not None}


def evaluate_run(run: ClusterTotals, job: ClusterTotals) -> dict[str, float]:
    """Return the measured values of a summary: tag -> value."""
    bases = {"run": run, "job": job}
    shown = [(entry, base) for entry in METRICS.values() for base in entry.run_bases]
    values = {entry.tag(base): entry.formula(bases[base]) for entry, base in shown}
    return {tag: value for tag, value in values.items() if value is not None}


def errors(run: ClusterTotals, job: ClusterTotals) -> dict[str, tuple[float, float]]:
    """Return the errors of a summary's values: tag -> (random, systematic), half-widths of 95 % intervals.

    For energy and power, an error is the change of the metric when the energy changes by the error of the energy. Means
    of samples have only a random error.
    """
    bases = {"run": run, "job": job}
    found: dict[str, tuple[float, float]] = {}
    for entry in METRICS.values():
        for base in entry.run_bases:
            totals = bases[base]
            value = entry.formula(totals)
            if value is not None and entry.error is not None and (error := entry.error(totals)) is not None:
                found[entry.tag(base)] = (error, 0.0)
            if value is None or not totals.energy.joules:
                continue
            shares = (totals.energy.error_j / totals.energy.joules, totals.energy.gain_j / totals.energy.joules)
            random = _moved(entry.formula, totals, value, shares[0], gain=False)
            systematic = _moved(entry.formula, totals, value, shares[1], gain=True)
            if random or systematic:
                found[entry.tag(base)] = (random, systematic)
    return found


def _moved(formula: Formula, totals: ClusterTotals, value: float, share: float, gain: bool) -> float:
    scale = 1 + share
    energy, devices = totals.energy, totals.devices
    moved = replace(
        totals,
        energy=replace(
            energy,
            joules=_scaled(energy.joules, scale),
            gpus_j=_scaled(energy.gpus_j, scale),
            measured_j=_scaled(energy.measured_j, scale),
            gain_j=energy.gain_j * scale,
            start_j2=energy.start_j2 * scale**2,
            end_j2=energy.end_j2 * scale**2,
            inside_j2=energy.inside_j2 * scale**2,
        ),
    )
    if gain:  # the power readings of a sensor have the same gain error
        moved = replace(
            moved,
            constants=replace(totals.constants, baseline_w=_scaled(totals.constants.baseline_w, scale)),
            devices=replace(
                devices,
                power_peak_w=_scaled(devices.power_peak_w, scale),
                power_histogram_s={(bar + 0.5) * scale - 0.5: s for bar, s in devices.power_histogram_s.items()},
            ),
        )
    after = formula(moved)
    change = 0.0 if after is None else abs(after - value)
    return change if change > ROUNDING * abs(value) else 0.0


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
