"""Numbers with their units as text: the same number has the same text on every screen and page."""

from __future__ import annotations

import math
from collections.abc import Mapping

J_PER_KWH = 3.6e6
MIN_KWH = 0.01  # a smaller energy is shown in joules
MIN_SHARE = 0.0005  # a smaller share would be shown as 0.0 %

_SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def readable(value: float | None) -> str:
    """Return a number with three significant digits below 1,000, whole with separators above; "-" if unknown."""
    if value is None or value == 0:
        return "-" if value is None else "0"
    if 999.5 <= abs(value) < 1e10:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def scaled(value: float) -> tuple[str, str]:
    """Return a number with three digits, and the prefix of its unit.

    >>> scaled(10_512.0), scaled(0.02904), scaled(304.2)
    (('10.5', 'k'), ('29.0', 'm'), ('304', ''))
    """
    scale, prefix = next(((s, p) for s, p in _SCALES if abs(value) >= 0.9995 * s), _SCALES[-1])
    return readable(value / scale), prefix


def short_count(number: int) -> str:
    """Return a whole number, exact below a million.

    >>> short_count(160_000), short_count(7_241_732_096)
    ('160,000', '7.24G')
    """
    return f"{number:,}" if number < 1_000_000 else "".join(scaled(number))


def count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def rounded_up(error: float) -> str:
    """Return an error with two digits, rounded up, so that the shown error is never too small.

    >>> rounded_up(0.1201), rounded_up(5.0), rounded_up(1234.0)
    ('0.13', '5', '1,300')
    """
    if error <= 0:
        return "0"
    second_digit = 10.0 ** (math.floor(math.log10(error)) - 1)
    error = math.ceil(error / second_digit - 1e-9) * second_digit  # 1e-9: errors of the division
    return f"{error:,.0f}" if error >= 100 else f"{error:.2g}"


def percent(ratio: float) -> str:
    """Return a ratio in percent, rounded up like an error, and at least 0.01 %."""
    return f"{rounded_up(max(100 * ratio, 0.01))} %"


def errors_text(timing: float | None, sensor: float | None, *, brief: bool = False, timing_name: str = "timing") -> str:
    """Return the text of an energy's two errors, given as ratios and never combined; "" if both are unknown.

    With ``brief``, two errors are written without their names; ``timing_name`` is the name of the first one.
    """
    errors = [(ratio, name) for ratio, name in ((timing, f" {timing_name}"), (sensor, " sensor")) if ratio]
    return " ".join(f"±{percent(ratio)}" + ("" if brief and len(errors) == 2 else name) for ratio, name in errors)


def energy_unit(joules: float) -> tuple[str, float]:
    """Return the unit in which an energy is shown, and the joules of this unit."""
    return ("kWh", J_PER_KWH) if joules >= MIN_KWH * J_PER_KWH else ("J", 1.0)


def energy_amount(joules: float) -> str:
    """Return an energy in the unit in which it is shown."""
    unit, unit_j = energy_unit(joules)
    return f"{readable(joules / unit_j)} {unit}"


def shares_text(parts: Mapping[str, float]) -> str:
    """Return parts of a sum as percentages, the largest first; parts below 0.05 % are omitted."""
    total = sum(parts.values()) or 1.0
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {100 * part / total:.1f} %" for name, part in ordered if part >= MIN_SHARE * total)


def duration(seconds: float) -> str:
    """Return a duration for display, in seconds, minutes, hours or days."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
