"""The waterfall of a job as the texts of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from effllm.records.plain_text import one_line
from effllm.records.verdict import Waterfall, WaterfallPart
from effllm.views.text.numbers import energy_unit, readable

HOURS_FROM_H = 1.0


class WaterfallUnits(NamedTuple):
    """The units of the table; no unit of energy if no energy was measured."""

    time_name: str
    time_unit_s: float
    energy_name: str
    energy_unit_j: float
    has_cost: bool

    @classmethod
    def of(cls, waterfall: Waterfall) -> WaterfallUnits:
        noun, unit_s = ("hours", 3600.0) if waterfall.device_seconds >= 3600 * HOURS_FROM_H else ("seconds", 1.0)
        time_name = f"{one_line(waterfall.unit)}-{noun}"
        energy_name, unit_j = ("", 1.0) if waterfall.joules is None else energy_unit(waterfall.joules)
        return cls(time_name, unit_s, energy_name, unit_j, any(part.cost is not None for part in waterfall.parts))


def waterfall_header(units: WaterfallUnits) -> list[str]:
    """Return the names of the columns."""
    energy = [units.energy_name] if units.energy_name else []
    return ["part", "share", units.time_name, *energy, *(["cost"] if units.has_cost else []), "gain"]


def waterfall_notes(waterfall: Waterfall) -> Iterator[str]:
    """Yield the sentences below the table."""
    yield "gain: maximum gain in throughput if this part alone becomes useful work"
    yield "the gain of the verdict also includes the time that its cause adds to other parts"
    if any(part.is_split_by_time for part in waterfall.parts):
        yield "~: a share of the energy of all steps, in proportion to time"
    names = {part.name for part in waterfall.parts}
    if "below_peak" in names:
        yield "below peak: computation below the peak is usual and never the cause of a verdict"
    if "clock_below_maximum" in names:
        yield "clock below maximum: usual under load; the cause of a verdict only with a reason, such as heat"
    yield from (f"unknown: {one_line(line)}" for line in waterfall.unknown)


def waterfall_row(part: WaterfallPart, units: WaterfallUnits) -> list[str]:
    """Return the cells of a part."""
    cells = [
        one_line(part.name).replace("_", " "),
        f"{100 * part.share:.1f} %",
        readable(part.device_seconds / units.time_unit_s),
    ]
    if units.energy_name:
        mark = "~" if part.is_split_by_time else ""
        cells.append("-" if part.joules is None else mark + readable(part.joules / units.energy_unit_j))
    if units.has_cost:
        cells.append(readable(part.cost))
    cells.append("" if part.max_gain is None else f"{100 * part.max_gain:.1f} %")
    return cells
