"""Where the host was: its samples by kind, line and function as an icicle, and the lines as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from effllm.analysis.recorded_run import RecordedRun
from effllm.job.host_lines import KINDS, share_interval
from effllm.records.host_lines import WORKER, CodeLine, HostTime
from effllm.views.report.markup import Child, Markup, element, table, together
from effllm.views.report.plot import WIDTH

MAX_ROWS = 20  # of the table
COLORS = 8
_ROW_HEIGHT, _LETTER_WIDTH, _MIN_WIDTH = 24, 6.6, 1.0  # of a row, of a letter, and of a box that is drawn
_LEVELS: Sequence[Callable[[CodeLine], str]] = (lambda row: row.kind, lambda row: row.line, lambda row: row.function)


class _Box(NamedTuple):
    level: int  # 0: all samples; above: of `_LEVELS[level - 1]`
    begin: int  # in samples
    samples: int
    text: str
    color: int


def host_time(run: RecordedRun) -> Child:
    """Return the samples of the host, if the verdict is on a loss that the host may cause."""
    summary = run.summary
    if summary is None or summary.host is None:
        return element("p", "No stacks were recorded; Not measured has the reason.")
    cause = summary.verdict.cause if summary.verdict is not None else ""
    if cause not in (*KINDS, "straggler"):
        return element("p", "Not shown: the host causes no loss. effllm inspect RUN --stacks FILE has all samples.")
    host = summary.host
    workers = [line for line in host.lines if line.kind == WORKER]
    of_host = [line for line in host.lines if line.kind != WORKER]
    return together(
        _icicle("the host", of_host, host.samples),
        _icicle("DataLoader workers", workers, host.by_kind[WORKER]) if workers else None,
        _line_table(host),
    )


def _line_table(host: HostTime) -> Markup:
    lines = sorted(host.lines, key=lambda line: -line.samples)[:MAX_ROWS]
    rows = []
    for line in lines:
        total = host.by_kind[WORKER] if line.kind == WORKER else host.samples
        low, high = (100 * share for share in share_interval(line.samples, total))
        share = f"{100 * line.samples / total:.0f} % ({low:.0f} to {high:.0f})"
        rows.append([line.line, line.function, line.kind, f"{line.samples:,}", share])
    caption = "Lines by their number of samples, with the 95 % interval of their share"
    return table(caption, ("line", "in function", "kind", "samples", "share"), rows, range(3))


def _icicle(sampled: str, lines: Sequence[CodeLine], total: int) -> Markup:
    boxes = [_Box(0, 0, total, f"{sampled}: {total:,} samples", 0), *_boxes(lines, 0, 0)]
    drawn = [_drawn_box(box, total) for box in boxes if WIDTH * box.samples >= _MIN_WIDTH * total]
    size = f"0 0 {WIDTH} {_ROW_HEIGHT * (len(_LEVELS) + 1)}"
    drawing = element(
        "svg", drawn, viewBox=size, role="group", aria_label=f"Samples of {sampled} by kind, line and function"
    )
    return element("div", drawing, element("output", class_="readout"), class_="icicle")


def _boxes(lines: Iterable[CodeLine], level: int, begin: int, color: int = 0) -> Iterator[_Box]:
    """Yield the boxes of a level and of those below it, the largest first, from the sample ``begin`` on."""
    groups: dict[str, list[CodeLine]] = {}
    for line in lines:
        groups.setdefault(_LEVELS[level](line), []).append(line)
    sizes = {text: sum(line.samples for line in parts) for text, parts in groups.items()}
    for number, text in enumerate(sorted(groups, key=lambda name: -sizes[name])):
        color = color if level else number % COLORS  # boxes below a kind have its color
        if text:  # else a gap, as for a line without a function
            yield _Box(level + 1, begin, sizes[text], text, color)
        if level + 1 < len(_LEVELS):
            yield from _boxes(groups[text], level + 1, begin, color)
        begin += sizes[text]


def _drawn_box(box: _Box, total: int) -> Markup:
    x, width, y = WIDTH * box.begin / total, WIDTH * box.samples / total, _ROW_HEIGHT * box.level
    text = f"{box.text}: {100 * box.samples / total:.0f} %" if box.level else box.text
    letters = int((width - 8) / _LETTER_WIDTH)
    label = text if len(text) <= letters else f"{text[: letters - 1]}…" if letters > 3 else ""
    return element(
        "g",
        element("title", text),
        element(
            "rect", x=f"{x:.5g}", y=y, width=f"{width:.5g}", height=_ROW_HEIGHT - 1,
            class_=f"c{box.color}" if box.level else "all",
        ),
        element("text", label, x=f"{x + 4:.5g}", y=y + 16) if label else None,
        tabindex=0,
        role="img",
        aria_label=text,
    )  # fmt: skip
