"""Names of metrics in base units, for outputs whose readers expect base units, and the units in UCUM's notation."""

from __future__ import annotations

from effllm.metrics.table import Metric

#: Base units: unit -> (word in the metric's name, replacement of the word, factor of the value).
UNITS: dict[str, tuple[str, str, float]] = {
    "GB": ("gb", "bytes", 1e9),
    "GiB": ("gb", "bytes", 2.0**30),
    "MHz": ("mhz", "hertz", 1e6),
    "TFLOP/s": ("tflops", "flops_per_second", 1e12),
    "degC": ("c", "celsius", 1.0),
    "kg CO2e": ("kg", "grams", 1000.0),
    "Wh": ("wh", "joules", 3600.0),
    "s": ("s", "seconds", 1.0),
}

#: Unit of a metric -> the unit of its value in base units, in UCUM's notation (ucum.org); in braces are annotations.
UCUM: dict[str, str] = {
    "GB": "By",
    "GiB": "By",
    "MHz": "Hz",
    "TFLOP/s": "{flop}/s",
    "degC": "Cel",
    "kg CO2e": "g",
    "Wh": "J",
    "s": "s",
    "J": "J",
    "W": "W",
    "ratio": "1",
    "s/iteration": "s/{iteration}",
    "tokens/s": "{token}/s",
    "tokens/parameter/s": "{token}/{parameter}/s",
    "samples/s": "{sample}/s",
    "samples/parameter/s": "{sample}/{parameter}/s",
    "J/token": "J/{token}",
}


def name_of(entry: Metric) -> tuple[str, float]:
    """Return a metric's name in base units, and the factor of its values."""
    word, base, factor = UNITS.get(entry.unit, ("", "", 1.0))
    words = [base if base and part == word else part for part in entry.name.split("_")]
    return "_".join([entry.group, *words] if entry.group else words), factor
