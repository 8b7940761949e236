"""The end of a run: the verdict, the numbers to copy, what ran, what was not measured, and how to open it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from effllm.records.events import FILE, is_problem, level_of
from effllm.records.forecast import CO2_KG, ELECTRICITY, GPUS, JOULES, REMAINING_S, Foretold
from effllm.records.job import Summary, Value
from effllm.records.plain_text import one_line
from effllm.views.text.numbers import (
    J_PER_KWH,
    duration,
    energy_amount,
    errors_text,
    percent,
    readable,
    scaled,
    short_count,
)
from effllm.views.text.summary import (
    audit_texts,
    fact_lines,
    loss_text,
    slowest_text,
    status_text,
    stragglers_text,
    value_of,
    verdict_lines,
)
from effllm.views.text.window import contract_parts

MAX_LINES = 14
COLUMN = 11  # in which the texts begin
#: The most harmful gap first; each is the beginning of a sentence of ``not measured``.
_HARM = ("total tokens", "tokens", "samples", "loss", "MFU", "FLOPs", "peak", "own time", "sync point", "total energy",
         "energy", "power", "lines of code")  # fmt: skip
#: A rank that was last in a smaller share of the iterations is only in summary.txt.
MIN_LAST_SHARE = 0.5

Fact = tuple[str, str]


def closing_text(summary: Summary, folder: Path | None, tensorboard_dir: Path | None, *, is_cut: bool = False) -> str:
    """Return the end of a run as text; summary.txt in the run folder has all values.

    A cut text, for a terminal, has at most `MAX_LINES` of 80 columns.
    """
    simulated = " (SIMULATED: no hardware was measured)" * summary.simulated
    head = f"[EfficientLLM] Run {status_text(summary.status)}{simulated}"
    facts = list(facts_of(summary))
    missing = [("Missing", one_line(text)) for text in sorted(summary.not_measured, key=_harm_order)]
    openers = [("Open", text) for text in how_to_open(folder, tensorboard_dir, current_folder())]
    if is_cut:
        open_lines = [line for name, text in openers for line in fact_lines(name, text, 1, COLUMN)]
        room = MAX_LINES - 1 - bool(missing) - len(open_lines)  # without the head, and one line of what is missing
        for long_facts in _TWO_LINE_FACTS:  # the last one is short enough
            shown = [line for name, text in facts for line in fact_lines(name, text, 1 + (name in long_facts), COLUMN)]
            if len(shown) <= room:
                break
        lines = [*shown, *_missing_lines(missing, MAX_LINES - 1 - len(shown) - len(open_lines)), *open_lines]
    else:
        lines = [f"  {name:<9}{text}" for name, text in (*facts, *missing, *openers)]
    return "".join(f"{line}\n" for line in (head, *lines))


#: The facts that have two lines on a terminal, by the room that is left.
_TWO_LINE_FACTS = (("Why", "Result", "Paper", "Ran"), ("Why",), ())


def facts_of(summary: Summary, *, is_long: bool = False) -> Iterator[Fact]:
    """Yield the verdict, the numbers to copy, and what ran, each with its name.

    In the long form energies have the errors by timing and by the sensor, else only the larger one; the long form also
    has the tokens/s of the whole job and the warm-up.
    """
    if summary.verdict is not None:
        yield from verdict_lines(summary.verdict)
    for name, texts in (("Result", _result(summary, is_long)), ("Energy", _energy(summary, is_long))):
        if text := ", ".join(texts):
            yield name, text
    doubtful = [tag for tag, value in summary.metrics.items() if value.doubt]
    if parts := list(contract_parts({tag: value.value for tag, value in summary.metrics.items()}, doubtful)):
        yield "Paper", " ".join(parts)
    yield "Ran", ", ".join(_ran(summary, is_long))
    if text := "; ".join(forecast_texts(summary.forecast, summary.currency)):
        yield "End", text
    is_named = summary.verdict is not None and summary.verdict.cause == "straggler"
    if text := "" if is_named else "; ".join(_slow_rank_texts(summary)):
        yield "Slow", text
    if text := "; ".join(audit_texts(summary.audit)) if summary.audit is not None else "":
        yield "Doubt", text
    if text := _problem_counts(summary):
        yield "Events", text


def current_folder() -> Path | None:
    """Return the current folder; ``None`` if it was removed."""
    with contextlib.suppress(OSError):
        return Path.cwd()
    return None


def how_to_open(
    folder: Path | None, tensorboard_dir: Path | None, root: Path | None = None, command: str = "inspect"
) -> Iterator[str]:
    """Yield commands that open a run; paths below ``root`` are relative to it."""
    # TensorBoard names a run by its folder, so that it is shown beside the other runs.
    if tensorboard_dir is not None and tensorboard_dir.parent != folder:
        tensorboard_dir = tensorboard_dir.parent
    for program, path in ((f"effllm {command}", folder), ("tensorboard --logdir", tensorboard_dir)):
        if path is not None:
            shown = path.relative_to(root) if root is not None and path.is_relative_to(root) else path
            yield f"{program} {shlex.quote(str(shown))}"


def _missing_lines(missing: Sequence[Fact], room: int) -> Iterator[str]:
    """Yield the most harmful gaps, whole, and the number of the others."""
    num_shown, lines_left = 0, room
    for name, text in missing[:2]:
        lines = fact_lines(name, text, max(room, 1), COLUMN)
        is_last = num_shown + 1 == len(missing)
        if len(lines) > lines_left - (not is_last):  # the number of the others needs a line
            break
        yield from lines
        num_shown, lines_left = num_shown + 1, lines_left - len(lines)
    if more := len(missing) - num_shown:
        yield f"  {'Missing':<9}{more:,} {'more ' * bool(num_shown)}in summary.txt, not measured"


def _harm_order(sentence: str) -> int:
    return next((order for order, start in enumerate(_HARM) if sentence.startswith(start)), len(_HARM))


def _result(summary: Summary, is_long: bool) -> Iterator[str]:
    if is_long and (value := value_of(summary, "tokens_per_second")):
        yield f"{readable(value.value)} tokens/s{_doubt_mark(value)}"
    if value := value_of(summary, "tokens_per_second_per_gpu"):
        unit = "GPU" if summary.coverage.gpus_expected else "rank"
        yield f"{readable(value.value)} tokens/s per {unit}{_doubt_mark(value)}"
    if value := value_of(summary, "mfu_ratio"):
        peak = f" of {summary.peak.split(' per device')[0]}" if summary.peak else ""
        yield f"MFU {readable(100 * value.value)} %{_doubt_mark(value)}{peak}"
    if text := loss_text(summary):
        yield f"loss {text}"


def _energy(summary: Summary, is_long: bool) -> Iterator[str]:
    energy = summary.energy
    if value := value_of(summary, "joules_per_token"):
        number, prefix = scaled(value.value)
        error = _error_text(value.value, value.error, value.sensor_error, is_long)
        yield f"{number} {prefix}J/token{error}{_doubt_mark(value)}"
    joules = energy.measured_joules if energy.total_joules is None else energy.total_joules
    if joules is not None:
        is_part = energy.total_joules is None
        error_j = None if is_part else energy.error_joules
        error = _error_text(joules, error_j, (energy.gain_error or 0.0) * joules, is_long)
        yield f"{energy_amount(joules)}{error}{', measured only in part' * is_part}"
    if value := value_of(summary, "watts_per_gpu"):
        yield f"{readable(value.value)} W/GPU"
    if summary.waterfall is not None and summary.coverage.gpus_expected:
        yield f"{readable(summary.waterfall.device_seconds / 3600)} GPU-h"


def forecast_texts(forecast: Mapping[str, Foretold], currency: str = "") -> Iterator[str]:
    """Yield the foretold end of a job: remaining time, energy, CO2 and cost, each with its interval."""

    def shown(name: str, text: Callable[[float], str], unit: str = "") -> Iterator[str]:
        if (figure := forecast.get(name)) is not None:
            interval = None if figure.low is None or figure.high is None else (text(figure.low), text(figure.high))
            yield f"{text(figure.value)}{unit}" + (f" ({interval[0]} to {interval[1]})" if interval else "")

    yield from (f"in {text}" for text in shown(REMAINING_S, duration))
    yield from shown(JOULES, lambda joules: readable(joules / J_PER_KWH), " kWh")
    yield from shown(CO2_KG, readable, " kg CO2e")
    # The price of a GPU-hour includes the electricity.
    cost = GPUS if GPUS in forecast else ELECTRICITY
    yield from shown(cost, readable, f" {one_line(currency)}" if currency else " (cost)")


def _error_text(value: float, timing: float | None, sensor: float | None, is_long: bool) -> str:
    """Return the errors, or the larger one, in percent of a value."""
    ratios = [abs((error or 0.0) / value) if value else 0.0 for error in (timing, sensor)]
    if is_long:
        return f" {errors_text(*ratios)}".rstrip()
    return f" ±{percent(max(ratios))}" if any(ratios) else ""


def _doubt_mark(value: Value) -> str:
    return " (in doubt)" if value.doubt else ""


def _ran(summary: Summary, is_long: bool) -> Iterator[str]:
    step = value_of(summary, "seconds_per_iteration")
    length = f" of {readable(1000 * step.value)} ms" if step is not None else ""
    yield f"{summary.iterations:,} iterations{_iteration_range(summary)}{length} in {duration(summary.elapsed_s)}"
    if is_long and summary.energy.warmup_joules is not None:
        share = summary.energy.warmup_joules / (summary.energy.measured_joules or 1.0)
        yield f"warm-up with {percent(share)} of the energy left out" if share else "no warm-up left out"
    if summary.attempts > 1:
        yield f"{summary.attempts} attempts"
    for total, measured, what in (
        (summary.tokens, summary.measured_tokens, "tokens" + " from the batches" * bool(summary.token_source)),
        (summary.samples, summary.measured_samples, "samples"),
    ):
        if measured:
            yield f"{'at least ' if total is None else ''}{short_count(measured)} {what}"
    if summary.parameters:
        yield f"{short_count(summary.parameters)} parameters"
    coverage = summary.coverage
    ranks = f"{coverage.ranks_reporting} of {coverage.ranks_expected}"
    gpus = f"{coverage.gpus_measured} of {coverage.gpus_expected}"
    yield f"{ranks} ranks" + (" and GPUs" if gpus == ranks else f", {gpus} GPUs" * bool(coverage.gpus_expected))
    if coverage.reports_lost:
        yield f"{coverage.reports_lost:,} reports lost"
    if summary.goodput is not None and summary.goodput.ratio is not None:
        yield f"goodput {100 * summary.goodput.ratio:.1f} %"


def _slow_rank_texts(summary: Summary) -> Iterator[str]:
    if summary.stragglers:
        yield stragglers_text(summary.stragglers)
    ranks = summary.last_ranks
    if summary.coverage.ranks_expected > 2 and ranks.dominant_last_rank[1] > MIN_LAST_SHARE * ranks.iterations:
        yield slowest_text(summary)


def _problem_counts(summary: Summary) -> str:
    """Return the counts of the problems that were shown on the console."""
    shown = [kind for kind in summary.events if level_of(kind) != FILE and is_problem(kind) and kind != "straggler"]
    return ", ".join(f"{kind} {summary.events[kind]:,}" for kind in shown)


def _iteration_range(summary: Summary) -> str:
    """Return the numbers of the first and the last iteration of one attempt, unless they begin with 1."""
    attempts = summary.goodput.attempts if summary.goodput is not None else ()
    if len(attempts) != 1 or attempts[0].first in (None, 1):
        return ""
    return f" ({attempts[0].first:,} to {attempts[0].last:,})"
