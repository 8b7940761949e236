"""Writes the tables of columns in docs/run-folder.md: ``python tests/run_folder_page.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import effllm
from effllm.analysis.column import COLUMNS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "run-folder.md"
GOLDEN = ROOT / "tests" / "golden" / "run_folder_5"
#: Examples of columns that have no value in this run folder.
EXAMPLES = {
    "not_measured": ["energy: NVML gives neither an energy counter nor the power of this GPU"],
    "other_metrics": {"throughput/frames_per_second": 30.0},
    "run_throughput_device_step_seconds": 0.051,
    "throughput_device_step_seconds": 0.051,
    "other_devices_j": {"GPU-1": 120.5},
    "device": "GPU-1",
    "currency": "EUR",
    "forecast": {"remaining_seconds": {"value": 4.01, "low": 3.98, "high": 4.05}},
    "straggler_rank": 17,
    "straggler_step_s": 0.061,
    "straggler_median_s": 0.05,
    "stragglers": [{"ranks": [17], "host": "node2", "slowdown": 0.22}],
}
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
    return PAGE.read_text().partition(MARK)[0] + MARK + "".join(map(_section, COLUMNS))


def _section(table: str) -> str:
    rows = getattr(effllm.load(GOLDEN), table).fetchall()
    lines = [
        f"\n### {table}\n",
        ROWS[table],
        "",
        "| column | type | unit | meaning | example |",
        "|---|---|---|---|---|",
    ]
    for at, column in enumerate(COLUMNS[table]):
        values = [row[at] for row in rows if row[at] not in (None, {}, [])]
        full = [value for value in values if value not in ("{}", "[]")]
        shown = _example(column.name, next(iter([*full, *values]), EXAMPLES.get(column.name)))
        cells = (f"`{column.name}`", column.type, column.unit, column.meaning, shown)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _example(name: str, value: Any) -> str:
    assert value is not None, f"{name} has no example"
    if name == "folder":
        return "`/data/runs/run_folder_5`"
    if isinstance(value, float):
        text = f"{value:.12g}"
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False).strip('"')
    return f"`{text if len(text) <= MAX_LETTERS else text[: MAX_LETTERS - 1] + '…'}`"


if __name__ == "__main__":
    PAGE.write_text(page())
