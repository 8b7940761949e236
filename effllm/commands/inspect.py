"""Print the verdict on a run, and the parts of its device time.

The parts of the time and of the energy add up to the whole.
The verdict names the largest avoidable loss with its evidence and the next action, or "healthy", or "unknown".
For a running job, it covers the time so far. `effllm inspect` reads only summary.json of the run folder, and with
--stacks only stacks.jsonl.

\b
Examples:
  effllm inspect last                           # the run that started last
  effllm inspect RUN --mail | mail -s "your job" alice
  effllm inspect RUN --json | jq -r .verdict.cause
  effllm inspect RUN --json | jq '.waterfall.parts[] | {name, share}'
  effllm inspect RUN --stacks job.folded && flamegraph.pl job.folded >job.svg

Exit status: 0 success, 1 no summary or no stacks can be read, 2 wrong use.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from effllm import __version__
from effllm.analysis.run_folders import UnreadableRun, one_run
from effllm.analysis.run_row import Unreadable, read_record
from effllm.commands.output import complain, form_of
from effllm.job.host_lines import KINDS, MIN_SAMPLES, data_wait_share, is_of_worker, samples_and_places, share_interval
from effllm.records.host_lines import STACKS_FILE, HostTime, RecordedStacks
from effllm.records.job import SCHEMA_VERSION, Summary, version_error
from effllm.records.plain_text import one_line
from effllm.records.verdict import OF_GPUS, Waterfall
from effllm.store.own_files import replace_file
from effllm.store.reader import JsonLines
from effllm.views.text.closing import COLUMN, facts_of
from effllm.views.text.numbers import J_PER_KWH, count_text, duration, readable
from effllm.views.text.summary import fact_lines, status_text, value_of
from effllm.views.waterfall_text import WaterfallUnits, waterfall_header, waterfall_notes, waterfall_row

WIDTH = 80
MAX_BYTES = 8000  # of the JSON document
#: Letters of an explanation in the JSON document: the largest number with which the document has at most `MAX_BYTES`.
MAX_LETTERS = (300, 200, 110, 80, 50, 30, 3)
MAX_VERDICT = 300  # letters of a line of the verdict, and of a name
MAX_SHOWN = 5  # lines of code
MAIL_LINES, MAIL_WIDTH, BAR_LETTERS = 15, 78, 40  # of the text for a user
_MAX_NAMED_HOSTS = 4  # hosts in this text
_EXPLANATIONS = ("evidence", "claim", "unknown", "doubts")  # fields with explanations; other texts are names


def main(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, its name or how only that begins, or last.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    mail: Annotated[bool, typer.Option("--mail", help="Print a text of at most 15 lines for the user.")] = False,
    stacks: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recorded stacks for speedscope or flamegraph.pl.")
    ] = None,
) -> int:
    """Print the waterfall of a run or a text for its user, or write its stacks; return the exit status."""
    try:
        run = one_run(str(run))
    except UnreadableRun as error:
        return complain("inspect", str(error), 1)
    form = form_of(json=as_json, mail=mail, stacks=stacks is not None)
    if form == "stacks":
        assert stacks is not None
        return _write_stacks(run if run.is_dir() else run.parent, stacks)
    path = run / "summary.json" if run.is_dir() else run
    try:
        summary = read_record(path, Summary)
    except Unreadable as error:
        return complain("inspect", f"{path} cannot be read: {error}", 1)
    if summary is None:
        example = "efficientllm_runs/20260101-120000-1a2b3c4d"
        return complain("inspect", f"{path} does not exist; RUN is a run folder, such as {example}", 1)
    if form == "mail":
        print(mail_text(summary), end="")
        return 0
    if summary.waterfall is None:
        problem = f"{path} has no waterfall: no rank had reported any time when it was written; see again in a minute"
        return complain("inspect", problem, 1)
    if as_json:
        print(_short_json(_document(summary, summary.waterfall)))
    else:
        _print_waterfall(summary, summary.waterfall)
    return 0


def _write_stacks(folder: Path, to: Path) -> int:
    """Write each recorded stack with its number of samples in a line, the form of flamegraph.pl and speedscope."""
    samples: Counter[str] = Counter()  # by stack
    path, ranks = folder / STACKS_FILE, set()
    files = [file for file in (folder / f"{STACKS_FILE}.1", path) if file.exists()] or [path]  # a missing file raises
    recordings = JsonLines(files, RecordedStacks)
    try:
        for recorded in recordings:
            if problem := version_error(recorded.schema_version):
                return complain("inspect", f"{path} cannot be read: {problem}", 1)
            ranks.add(recorded.rank)
            for stack, count in recorded.stacks.items():
                samples[f"rank {recorded.rank};{one_line(stack)}"] += count
        if recordings.num_skipped:  # after a killed aggregator, or on a full disk
            complain("inspect", f"{path}: {count_text(recordings.num_skipped, 'line')} cannot be read")
        if not samples:
            return complain("inspect", f"{path} has no stacks", 1)
        text = "".join(f"{stack} {count}\n" for stack, count in samples.items())
        replace_file(to, text.encode(errors="replace"), durable=False)
    except OSError as error:
        advice = "; docs/lines-of-code.md has what is needed" if error.filename == str(path) else ""
        return complain("inspect", f"{error.filename or to}: {error.strerror or error}{advice}", 1)
    print(f"{one_line(str(to))}: {samples.total():,} samples of {count_text(len(ranks), 'rank')}")
    return 0


def _document(summary: Summary, waterfall: Waterfall) -> dict[str, Any]:
    """Return the answer for scripts; its top-level names are stable, and docs/verdict.md describes them."""
    verdict = msgspec.to_builtins(summary.verdict) or {}
    evidence = verdict.pop("evidence", [])
    return {
        "run": {name: getattr(summary, name) for name in ("run_id", "status", "is_over", "simulated")},
        "verdict": verdict or None,
        "waterfall": msgspec.to_builtins(waterfall),
        "evidence": evidence,
        "audit": msgspec.to_builtins(summary.audit),
        "host": _host_document(summary),
        "versions": {"schema": SCHEMA_VERSION, "effllm": __version__},
    }


def _host_document(summary: Summary) -> dict[str, Any] | None:
    """Return the lines of code with the most samples of the loss that the verdict names, or ``None``."""
    cause = summary.verdict.cause if summary.verdict else ""
    if summary.host is None or cause not in KINDS:
        return None
    samples, lines = samples_and_places(summary.host, cause, data_wait_share(summary.waterfall))
    shown = [{"line": line, "function": function, "samples": count} for line, function, count in lines[:MAX_SHOWN]]
    return {"samples": samples, "is_of_worker": is_of_worker(summary.host, cause), "lines": shown}


def _short_json(document: dict[str, Any]) -> str:
    """Return a document as JSON of at most `MAX_BYTES`: all numbers, and explanations as long as there is room."""
    run_and_verdict = {name: _cut(document.pop(name), MAX_VERDICT) for name in ("run", "verdict")}
    text = ""
    for letters in MAX_LETTERS:
        fields = {**run_and_verdict, **{name: _cut(value, MAX_VERDICT, letters) for name, value in document.items()}}
        text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
        if len(text) <= MAX_BYTES:
            break
    return text


def _cut(value: Any, letters: int, explanation_letters: int = MAX_VERDICT) -> Any:
    """Return a document with numbers of 6 digits, and with texts and explanations of at most so many letters."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, str) and len(value) > letters:
        return value[: letters - 3] + "..."
    if isinstance(value, dict):
        limits = {name: explanation_letters if name in _EXPLANATIONS else letters for name in value}
        return {name: _cut(item, limits[name], explanation_letters) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cut(item, letters, explanation_letters) for item in value]
    return value


def _print_waterfall(summary: Summary, waterfall: Waterfall) -> None:
    console = Console(width=WIDTH, highlight=False)
    simulated = "; simulated devices" if summary.simulated else ""
    name = f"{one_line(summary.run_id)}: " if summary.run_id else ""
    console.print(Text(f"{name}{one_line(summary.status)} after {duration(summary.elapsed_s)}{simulated}"))
    for name, text in facts_of(summary, is_long=True):
        console.print(Text("\n".join(fact_lines(name, text, column=COLUMN))))
    units = WaterfallUnits.of(waterfall)
    table = Table(*waterfall_header(units), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for column in table.columns[3:]:
        column.no_wrap = True
    for part in waterfall.parts:
        table.add_row(*map(Text, waterfall_row(part, units)))
    console.print(table)
    for line in waterfall_notes(waterfall):
        console.print(Text(line))
    cause = summary.verdict.cause if summary.verdict else ""
    for line in host_lines(summary.host, cause, data_wait_share(waterfall)) if summary.host else ():
        console.print(Text(line))
    if summary.verdict is not None:
        for evidence in summary.verdict.evidence:
            console.print(Text(f"evidence: {one_line(evidence.claim)} ({one_line(evidence.source)})"))


def host_lines(host: HostTime, cause: str, data_share: float = 0.0) -> Iterator[str]:
    """Yield a heading and the lines of code with the most samples of a loss; nothing with less than `MIN_SAMPLES`.

    ``data_share`` is the share of the time that is a wait for data.
    """
    samples, lines = samples_and_places(host, cause, data_share) if cause in KINDS else (0, [])
    if samples < MIN_SAMPLES:
        return
    is_worker = is_of_worker(host, cause)
    of_all = f" of {host.samples:,}" if samples < host.samples and not is_worker else ""
    torn = f" ({host.torn:,} torn)" if host.torn and not is_worker else ""
    who = "a DataLoader worker" if is_worker else "the host"
    ranks = list(host.by_rank)
    of_ranks = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    yield f"where {who} was, in {samples:,}{of_all} samples of {of_ranks}{torn}:"
    for line, function, count in lines[:MAX_SHOWN]:
        low, high = (100 * share for share in share_interval(count, samples))
        place = f"{function}, called in {line}" if function else line
        yield f"{100 * count / samples:4.0f} % ({low:.0f} to {high:.0f})  {one_line(place)}"


def mail_text(summary: Summary) -> str:
    """Return a text of at most `MAIL_LINES` lines; the explanation of the verdict is cut if it is too long."""
    lines = [text[:MAIL_WIDTH] for text in _mail_lines(summary)]
    if (verdict := summary.verdict) is not None:
        next_lines = _wrapped_lines("Next", verdict.next, 2)
        lines += _wrapped_lines("Verdict", verdict.text, 1)
        lines += [*_wrapped_lines("Why", verdict.why, MAIL_LINES - len(lines) - len(next_lines)), *next_lines]
    return "".join(f"{line}\n" for line in lines)


def _wrapped_lines(name: str, text: str, max_lines: int) -> list[str]:
    """Return a text after its name, in at most ``max_lines`` lines of a mail."""
    if max_lines < 1 or not text:
        return []
    named = f"{name}: {one_line(text)}"
    return textwrap.wrap(named, MAIL_WIDTH, subsequent_indent="  ", max_lines=max_lines, placeholder=" …")


def _mail_lines(summary: Summary) -> Iterator[str]:
    job = [one_line(part) for part in (summary.job_id or summary.run_id, summary.job_name) if part]
    yield f"Job ID: {', '.join(job)}"
    users = {"User": summary.user, "account": summary.account, "partition": summary.partition}
    if text := ", ".join(f"{name}: {one_line(part)}" for name, part in users.items() if part):
        yield text
    simulated = " (SIMULATED: no hardware was measured)" * summary.simulated
    yield f"State: {status_text(one_line(summary.status))} after {duration(summary.elapsed_s)}{simulated}"
    hosts = [one_line(host) for host in summary.hosts]
    count = summary.host_count or len(hosts)
    names = ", ".join(hosts[:_MAX_NAMED_HOSTS]) + ", …" * (count > _MAX_NAMED_HOSTS)
    gpus = f"{summary.coverage.gpus_expected:,} GPUs" if summary.coverage.gpus_expected else "no GPUs"
    models = ", ".join(map(one_line, summary.gpu_models))
    if count:
        yield f"Nodes: {count:,} ({names}), {gpus}" + (f" ({models})" if models else "")
    for name, metric in (("GPUs busy", "pcu_ratio"), ("MFU", "mfu_ratio")):
        if summary.coverage.gpus_expected and (value := value_of(summary, metric)) is not None:
            yield _share_bar(name, value.value)
    if (memory := value_of(summary, "peak_gb")) is not None:
        yield f"Memory: at most {readable(memory.value)} GB on a device"
    waterfall, energy = summary.waterfall, summary.energy.measured_joules
    if waterfall is not None and waterfall.unit == OF_GPUS:
        hours, wasted = readable(waterfall.device_seconds / 3600), readable(waterfall.avoidable_seconds / 3600)
        yield f"GPU-hours: {hours}, of which {wasted} were avoidable losses (parts: effllm inspect)"
    if energy is not None:
        watts = value_of(summary, "watts_per_gpu")
        mean = f", {readable(watts.value)} W per GPU" if watts is not None else ""
        yield f"Energy: {readable(energy / J_PER_KWH)} kWh{mean}"


def _share_bar(name: str, ratio: float) -> str:
    """Return a share as a bar.

    >>> _share_bar("MFU", 0.25)
    'MFU         [||||||||||                            25%]'
    """
    percent = f"{100 * ratio:.0f}%"
    filled = "|" * round(min(max(ratio, 0.0), 1.0) * BAR_LETTERS)
    return f"{name:<12}[{filled[: BAR_LETTERS - len(percent)]:<{BAR_LETTERS - len(percent)}}{percent}]"
