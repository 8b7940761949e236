"""Published peaks of others against the predicted intervals.

The table of docs/fit.md must have the same values.  ``python tests/unit/test_fit_published.py`` prints the table.
"""

import json
from pathlib import Path

from effllm.memory.config_json import find_model
from effllm.memory.estimate import estimate
from effllm.memory.plan import MemoryPlan

ROOT = Path(__file__).resolve().parents[2]
ROWS = json.loads((ROOT / "tests/golden/published_memory.json").read_text())
UNITS = {"GB": 1e9, "GiB": 2.0**30}


def predicted(row):
    found = estimate(find_model(row["model"]).shape, MemoryPlan(**row["plan"]))
    return {"allocated": found.allocated, "reserved": found.reserved, "total": found.total}[row["kind"]]


def published(row):
    return row["size"] * UNITS[row["unit"]]


def is_inside(row):
    """Whether the interval has a number that is published as this figure, which is rounded to its last digit."""
    figure = row["figure"].split()[0]
    half = 0.5 * 10.0 ** -len(figure.partition(".")[2]) * UNITS[row["unit"]]
    return predicted(row).low <= published(row) + half and published(row) - half <= predicted(row).high


def table():
    for row in ROWS:
        found, size = predicted(row), published(row)
        error = 100 * (found.expected / size - 1)
        cells = (
            row["name"],
            f"{size / 1e9:.1f}",
            f"{found.expected / 1e9:.1f} ({found.low / 1e9:.1f}-{found.high / 1e9:.1f})",
            f"{error:+.0f} %",
            "inside" if is_inside(row) else "miss",
        )
        yield f"| {' | '.join(cells)} |"


def test_document_has_every_published_peak_with_its_prediction():
    lines = (ROOT / "docs/fit.md").read_text().splitlines()

    assert [line for line in table() if line not in lines] == []
    inside = sum(map(is_inside, ROWS))
    assert f"{inside} of the {len(ROWS)} published peaks are inside" in " ".join(lines)


def test_published_rows_have_a_source_and_the_figure_of_their_size():
    for row in ROWS:
        assert row["source"].startswith("https://"), row["name"]
        assert float(row["figure"].split()[0]) == row["size"], row["name"]
    assert len({row["name"] for row in ROWS}) == len(ROWS)


def test_no_prediction_is_wrong_by_more_than_40_percent():
    errors = [predicted(row).expected / published(row) - 1 for row in ROWS]

    assert max(map(abs, errors)) < 0.4


if __name__ == "__main__":
    print("\n".join(table()))
