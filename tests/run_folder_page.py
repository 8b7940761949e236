"""Writes the tables of columns in docs/run-folder.md: ``python tests/run_folder_page.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import effllm
from effllm.analysis.database import TABLES, columns_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "run-folder.md"
OLDER = ROOT / "tests" / "golden" / "run_folder_1"
MARK = "<!-- tables -->\n"
ROWS = {
    "runs": "One row per run, from `run.json` and `summary.json`.",
    "windows": "One row per line of `windows-*.jsonl`: one window of the whole job.",
    "ranks": "One row per line of `ranks-*.jsonl`: one rank's window, with the readings of its first device. Jobs "
    "above 256 ranks have only the rows of outliers.",
    "events": "One row per line of `events.jsonl`.",
}
MAX_LETTERS = 40


def page() -> str:
    """Return the page with new tables; the text before the mark stays."""
    return PAGE.read_text().partition(MARK)[0] + MARK + "".join(map(_section, TABLES))


def _section(table: str) -> str:
    run = effllm.load(OLDER)
    relation = getattr(run, table)
    rows = relation.fetchall()
    lines = [
        f"\n### {table}\n",
        ROWS[table],
        "",
        "| column | type | unit | meaning | example |",
        "|---|---|---|---|---|",
    ]
    for at, column in enumerate(columns_of(table)):
        value = next((row[at] for row in rows if row[at] not in (None, {}, [])), None)
        shown = _example(column.name, value)
        cells = (f"`{column.name}`", column.type, column.unit, column.meaning, shown)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _example(name: str, value: Any) -> str:
    if value is None:
        return "null"
    if name == "folder":
        return "`/data/runs/run_folder_1`"
    text = f"{value:.12g}" if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)
    text = text.strip('"')
    return f"`{text if len(text) <= MAX_LETTERS else text[: MAX_LETTERS - 1] + '…'}`"


if __name__ == "__main__":
    PAGE.write_text(page())
