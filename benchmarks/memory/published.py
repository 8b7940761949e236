"""Published peaks against the intervals of the estimate, and against the numbers of other estimators."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory.peers import Peer
from effllm.job.host_lines import share_interval
from effllm.memory.config_json import find_model, find_variant, read_config
from effllm.memory.estimate import ByteRange, estimate
from effllm.memory.plan import MemoryPlan, ModelShape

ROOT = Path(__file__).parents[2]
SETS = {
    "learning": ("tests/golden/published_memory.json", "benchmarks/results/2026-11-27-published-peaks.json"),
    "held out, first": ("benchmarks/results/2026-11-29-held-out-peaks.json",),
    "held out, second": ("benchmarks/results/2026-11-29-held-out-peaks-2.json",),
    "held out, third": ("benchmarks/results/2026-11-29-held-out-peaks-3.json",),
    "held out, fourth": ("benchmarks/results/2026-11-29-held-out-peaks-4.json",),
    "held out, fifth": ("benchmarks/results/2026-11-29-held-out-peaks-5.json",),
}
UNITS = {"GB": 1e9, "GiB": 2.0**30, "MiB": 2.0**20, "thousand MiB": 1000 * 2.0**20}
NEAR = 0.12  # relative error of a number that is near
HEADING = """## Published peaks

The formulas and their limits were corrected on the learning rows, and on the first four held-out sets after each had
been judged once; on the fifth, the products of torchtitan's selective checkpointing. The intervals are meant to contain
nine of ten peaks. Half of their width, and the error, are medians.
"""
OTHERS = f"""
## Other estimators, the same rows

The number over the published peak: median, and share within {100 * NEAR:.0f} %. None of the others warns of a setting
for which it has no argument; "made for" are the rows without such settings.
"""


@dataclass(frozen=True)
class Published:
    """A published peak in bytes, half of its last digit, and the interval of the same memory."""

    row: dict[str, Any]
    shape: ModelShape
    plan: MemoryPlan
    size: float
    half: float
    found: ByteRange

    @property
    def is_inside(self) -> bool:
        """Whether the interval has a number that is published as this figure, which is rounded to its last digit."""
        return self.found.low <= self.size + self.half and self.size - self.half <= self.found.high

    @property
    def error(self) -> float:
        return self.found.expected / self.size - 1

    @property
    def kinds(self) -> tuple[str, str, str]:
        return self.row["kind"], "all", "/".join(self.row["source"].split("/")[3:5])


def judged(row: dict[str, Any]) -> Published | None:
    """Return a row with its estimate; None if its model is not in the table."""
    model = row["model"]
    known = None if isinstance(model, dict) else find_model(model) or find_variant(model)
    if known is None and not isinstance(model, dict):
        return None
    shape = known.shape if known else read_config(model)
    plan = MemoryPlan(**{key: value for key, value in row["plan"].items() if value is not None})
    unit, figure = UNITS[row["unit"]], re.search(r"\d+(\.\d*)?", row.get("figure", ""))
    text = figure[0] if figure and float(figure[0]) == row["size"] else str(row["size"])
    half = 0.5 * 10.0 ** -len(text.partition(".")[2]) * unit
    return Published(row, shape, plan, row["size"] * unit, half, getattr(estimate(shape, plan), row["kind"]))


def published(peers: Sequence[Peer]) -> Iterator[str]:
    """Yield the lines of the report."""
    sets: dict[str, list[Published]] = {}
    left_out = Counter[str]()
    yield HEADING
    yield from head("rows", "memory or source", "inside", "share, 95 % interval", "half-width", "error")
    for name, files in SETS.items():
        rows = [(row, judged(row)) for one in files for row in json.loads((ROOT / one).read_text())]
        sets[name] = of = [one for _, one in rows if one]
        left_out.update(row["model"] for row, one in rows if one is None)
        for kind in sorted({kind for one in of for kind in one.kinds}, key=lambda kind: ("/" in kind, kind)):
            yield line(name, kind, *_inside([one for one in of if kind in one.kinds]))
    yield from ("", f"Not judged, because the model is not in the table: {_counted(left_out)}.", OTHERS)
    yield from head("estimator", "rows", "number", "ratio", "near", "made for", "ratio", "near", "error")
    for name, of in sets.items():
        ratios = [(one, 1 + one.error) for one in of]
        yield line("effllm fit", name, *_ratios(ratios), *_ratios(ratios), "")
        yield from (_rival(name, of, peer) for peer in peers)
    yield from ("", *head("row", "memory", "published, GB", "estimate, GB", "error", "interval"))
    for one in (one for of in sets.values() for one in of):
        size, low, expected, high = (
            f"{value / 1e9:.1f}" for value in (one.size, one.found.low, one.found.expected, one.found.high)
        )
        cells = size, f"{expected} ({low}-{high})", f"{100 * one.error:+.0f} %", "inside" if one.is_inside else "miss"
        yield line(one.row["name"], one.row["kind"], *cells)


def _rival(name: str, of: Sequence[Published], peer: Peer) -> str:
    ratios, failed = [], Counter[str]()
    for one in of:
        try:
            ratios.append((one, peer.estimate(one.shape, one.plan) / one.size))
        except ImportError as error:
            return line(peer.name, name, f"left out ({error}): {peer.get}", *[""] * 6)
        except Exception as error:  # noqa: BLE001 - the code of others may raise anything
            failed[f"{type(error).__name__}: {error}"] += 1
    made_for = [pair for pair in ratios if peer.is_made_for(pair[0].plan)]
    return line(peer.name, name, *_ratios(ratios), *_ratios(made_for), _counted(failed))


def _inside(of: Sequence[Published]) -> Iterator[str]:
    inside = sum(one.is_inside for one in of)
    low, high = share_interval(inside, len(of))
    yield from (f"{inside} of {len(of)}", f"{100 * low:.0f}-{100 * high:.0f} %")
    yield f"{100 * median((one.found.high - one.found.low) / 2 / one.found.expected for one in of):.0f} %"
    yield f"{100 * median(abs(one.error) for one in of):.0f} %"


def _ratios(found: Sequence[tuple[Published, float]]) -> tuple[str, str, str]:
    if not found:
        return "0", "", ""
    near = sum(abs(ratio - 1) <= NEAR for _, ratio in found)
    return str(len(found)), f"{median(ratio for _, ratio in found):.2f}", f"{100 * near / len(found):.0f} %"


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in found.items())


def head(*names: str) -> tuple[str, str]:
    return line(*names), "|---" * len(names) + "|"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
