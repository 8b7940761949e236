"""The end of a run in plain text, at most 80 columns: for the console and for whoever reads summary.json later."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from effllm.metrics import METRICS, describe
from effllm.schema import Summary, Value

WIDTH = 78

_OVER = {"run": "run to date", "window": "last window", "job": "whole job"}


def readable(value: float) -> str:
    """Return a number as people read it: three significant digits, whole from a hundred on, with separators."""
    if value == 0:
        return "0"
    if 999.5 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """Return a time as people say it: seconds, minutes, hours or days, as fits."""
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


def summary_text(summary: Summary, folder: Path | None, tensorboard_dir: Path | None) -> str:
    """Return the table that ends a run."""
    return "".join(f"{line}\n" for line in _lines(summary, folder, tensorboard_dir))


def _lines(summary: Summary, folder: Path | None, tensorboard_dir: Path | None) -> Iterator[str]:
    yield f"[EfficientLLM] Run {summary.status}"
    yield "=" * WIDTH
    if summary.simulated:
        yield "  SIMULATED: no hardware was measured; these numbers mean nothing beyond a test."
        yield "-" * WIDTH
    yield from _facts(_what_ran(summary))
    yield "-" * WIDTH
    yield from _metrics(summary.metrics)
    yield "-" * WIDTH
    yield from _facts(_how_measured(summary))
    for sentence in summary.not_measured:
        yield from textwrap.wrap(sentence, WIDTH, initial_indent="  not measured: ", subsequent_indent="    ")
    if folder is not None or tensorboard_dir is not None:
        yield "-" * WIDTH
    if folder is not None:
        yield f"  Run folder: {folder}"
    if tensorboard_dir is not None:
        yield f"  TensorBoard: tensorboard --logdir {shlex.quote(str(tensorboard_dir))}"


def _what_ran(summary: Summary) -> Iterator[tuple[str, str]]:
    again = f" in {summary.attempts} attempts" if summary.attempts > 1 else ""
    yield "iterations", f"{summary.iterations:,}{again}"
    yield "elapsed", duration(summary.elapsed_s)
    if summary.tokens:
        yield "tokens", f"{summary.tokens:,}"
    if summary.samples:
        yield "samples", f"{summary.samples:,}"
    if summary.parameters:
        yield "parameters", f"{summary.parameters:,} ({summary.parameters_kind})"
    if summary.loss is not None and math.isfinite(summary.loss):
        yield "last loss", f"{summary.loss:.6f}"
    if summary.time_by_class:
        yield "time", _shares(summary.time_by_class)


def _how_measured(summary: Summary) -> Iterator[tuple[str, str]]:
    energy, coverage = summary.energy, summary.coverage
    if energy.total_joules is not None:
        yield "energy", _energy(energy.total_joules, energy.error_joules, energy.gain_error)
    elif energy.measured_joules is not None:
        yield "energy", f"{_energy(energy.measured_joules, None, energy.gain_error)}, only in part measured: no total"
    if energy.scope or energy.method:
        yield (
            "power",
            ", ".join(part for part in (_named("scope", energy.scope), _named("from", energy.method)) if part),
        )
    if any(energy.by_class.values()):
        yield "energy in", _shares({name: joules for name, joules in energy.by_class.items() if joules is not None})
    yield "ranks", f"{coverage.ranks_reporting} of {coverage.ranks_expected} reported"
    yield "GPUs", f"{coverage.gpus_measured} of {coverage.gpus_expected} measured"
    yield "reports", f"{coverage.reports_lost} lost, {coverage.reports_late} late"


def _metrics(values: Mapping[str, Value]) -> Iterator[str]:
    shown: set[str] = set()
    group = ""
    yield f"  {'metric':<28}{'value':>14}  {'unit':<21}over"
    for entry in METRICS.values():
        # One line for each metric, on the first base that has a value; summary.json holds them all.
        base = next((base for base in entry.bases if entry.tag(base) in values), None)
        shown.update(entry.tag(base) for base in entry.bases)
        if base is None:
            continue
        if entry.group != group:
            group = entry.group
            yield f"  {group}"
        yield _row(("  " if group else "") + entry.name, values[entry.tag(base)], _OVER[base])
    for tag in values:
        if tag not in shown and describe(tag) is None:
            yield _row(tag, values[tag], "")


def _row(name: str, value: Value, over: str) -> str:
    number = readable(value.value) + (f" ±{readable(value.error)}" if value.error else "")
    if value.coverage is not None and value.coverage < 0.995:
        over = f"{100 * value.coverage:.0f} % covered"
    return f"  {name:<28}{number:>14}  {value.unit:<21}{over}".rstrip()


def _facts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, text in pairs:
        yield from textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<14}", subsequent_indent=" " * 16)


def _shares(parts: Mapping[str, float]) -> str:
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {100 * part / total:.1f} %" for name, part in ordered if part > 0)


def _energy(joules: float, error_joules: float | None, gain_error: float | None) -> str:
    text = f"{readable(joules)} J ({readable(joules / 3.6e6)} kWh)"
    if error_joules is not None:
        text += f", ±{readable(error_joules)} J timing"
    return text if gain_error is None else f"{text}, ±{readable(100 * gain_error)} % sensor"


def _named(word: str, value: str | None) -> str:
    return f"{word} {value}" if value else ""
