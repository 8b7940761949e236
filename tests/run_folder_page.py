"""Writes the tables of columns in docs/run-folder.md: ``python tests/run_folder_page.py``."""

from __future__ import annotations

from pathlib import Path

from effllm.analysis.column import COLUMNS, column_of, metric_columns

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "run-folder.md"
GOLDEN = ROOT / "tests" / "golden" / "run_folder_5"
MARK = "<!-- tables -->\n"
ROWS = {
    "runs": "One row per run, from `run.json` and `summary.json`.",
    "windows": "One row per line of `windows-*.jsonl`: one window of the whole job.",
    "ranks": "One row per line of `ranks-*.jsonl`: one rank's window, with the readings of its first device. Jobs "
    "above 256 ranks have only the rows of outliers.",
    "events": "One row per line of `events.jsonl`.",
}
OF_METRICS = {
    "runs": {column_of(tag) for tag in metric_columns()},
    "windows": {column_of(tag) for tag in metric_columns(in_windows=True)},
}


def page() -> str:
    """Return the page with new tables; the text before the mark stays."""
    return PAGE.read_text().partition(MARK)[0] + MARK + "".join(map(_section, COLUMNS))


def _section(table: str) -> str:
    of_metrics = OF_METRICS.get(table, set())
    cells = [(f"`{one.name}`", one.meaning.replace("|", "\\|")) for one in COLUMNS[table] if one.name not in of_metrics]
    lines = [
        f"\n### {table}\n",
        ROWS[table],
        "",
        "| column | meaning |",
        "|---|---|",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]
    if of_metrics:
        names = ", ".join(f"`{one.name}`" for one in COLUMNS[table] if one.name in of_metrics)
        lines += ["", f"Columns of metrics: {names}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
