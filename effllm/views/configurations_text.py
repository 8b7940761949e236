"""The table of configurations as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from effllm.analysis.configurations import Configurations, MeanOfRuns, label
from effllm.records.plain_text import one_line
from effllm.store import csv_file
from effllm.views.comparison_text import markdown_table, markdown_text
from effllm.views.text.numbers import readable

MAX_WIDTH = 1000  # in which the width of a table is measured
_LATEX = re.compile(r"[&%$#_{}~^\\]")
_LATEX_NAMES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def table_rows(table: Configurations) -> list[list[str]]:
    """Return the table with its header, each cell as ``12.3 ± 0.4 %``."""
    arrows = [f"{label(metric)} {'↑' if metric.higher_is_better else '↓'}" for metric in table.metrics]
    rows = [["configuration", "runs", *arrows, *(["score"] if table.scores else [])]]
    for row, (side, cells) in enumerate(zip(table.sides, table.rows, strict=True)):
        score = table.scores[row] if table.scores else None
        scores = ["-" if score is None else f"{score:.3f}"] if table.scores else []
        rows.append([one_line(side.name), str(len(side.runs)), *map(_cell_text, cells), *scores])
    return rows


def _cell_text(cell: MeanOfRuns) -> str:
    if cell.mean is None:
        return "-"
    mean = f"{cell.mean:.2e}" if 0 < abs(cell.mean) < 0.01 else readable(cell.mean)
    interval = f" ± {100 * cell.half / abs(cell.mean):.2g} %" if cell.half is not None and cell.mean else ""
    return mean + interval + "!" * cell.is_in_doubt


def print_table(table: Configurations, console: Console) -> None:
    """Print the table; if it is too wide, each configuration is a column."""
    rows = table_rows(table)
    wide = _rich_table(rows)
    is_wide = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), wide).maximum > console.width
    console.print(_rich_table([list(column) for column in zip(*rows, strict=True)]) if is_wide else wide)
    for note in table.notes:
        console.print(Text(note))


def _rich_table(rows: list[list[str]]) -> Table:
    shown = Table(*map(escape, rows[0]), box=None, pad_edge=False)
    shown.columns[0].overflow = "fold"
    for column in shown.columns[1:]:
        column.justify, column.overflow = "right", "fold"
    for row in rows[1:]:
        shown.add_row(*map(Text, row))
    return shown


def markdown(table: Configurations) -> str:
    header, *rows = table_rows(table)
    return "\n".join([*markdown_table(header, rows), "", *(f"- {markdown_text(note)}" for note in table.notes)])


def latex(table: Configurations) -> str:
    """Return a tabular for LaTeX's package booktabs."""
    header, *rows = ([_latex_escaped(cell) for cell in row] for row in table_rows(table))
    lines = [" & ".join(row) + r" \\" for row in (header, *rows)]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"
    notes = [f"% {one_line(note)}" for note in table.notes]
    return "\n".join([*notes, begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}"])


def _latex_escaped(text: str) -> str:
    escaped = _LATEX.sub(lambda match: _LATEX_NAMES.get(match[0], f"\\{match[0]}"), text)
    return escaped.replace("±", r"$\pm$").replace("↑", r"$\uparrow$").replace("↓", r"$\downarrow$")


def csv_text(table: Configurations) -> str:
    """Return the table with all digits: of each metric the mean and the ends of its interval."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [f"{metric.name}{end}" for metric in table.metrics for end in ("", "_low", "_high")]
    writer.writerow(["configuration", "runs", *names, "score", "in_doubt"])
    for row, (side, cells) in enumerate(zip(table.sides, table.rows, strict=True)):
        numbers: list[float | None] = []
        for cell in cells:
            offsets = (None, None) if cell.mean is None or cell.half is None else (-cell.half, cell.half)
            numbers += [cell.mean, *(None if offset is None else (cell.mean or 0.0) + offset for offset in offsets)]
        doubts = " ".join(metric.name for metric, cell in zip(table.metrics, cells, strict=True) if cell.is_in_doubt)
        score = table.scores[row] if table.scores else None
        writer.writerow([csv_file.cell(side.name), len(side.runs), *map(csv_file.cell, numbers), score, doubts])
    return out.getvalue().rstrip("\n")
