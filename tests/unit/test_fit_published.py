"""Published peaks of others against the predicted intervals.

The table of benchmarks/results/published-peaks.md must have the same values, and docs/fit.md has their number.
``python tests/unit/test_fit_published.py`` prints the table.
"""

import json

from benchmarks.memory.published import ROOT, SETS, judged

ROWS = json.loads((ROOT / SETS["learning"][0]).read_text())


def table():
    for row in ROWS:
        one = judged(row)
        found, size = one.found, one.size
        cells = (
            row["name"],
            f"{size / 1e9:.1f}",
            f"{found.expected / 1e9:.1f} ({found.low / 1e9:.1f}-{found.high / 1e9:.1f})",
            f"{100 * one.error:+.0f} %",
            "inside" if one.is_inside else "miss",
        )
        yield f"| {' | '.join(cells)} |"


def test_document_has_every_published_peak_with_its_prediction():
    lines = (ROOT / "benchmarks/results/published-peaks.md").read_text().splitlines()
    text = " ".join((ROOT / "docs/fit.md").read_text().split())

    assert [line for line in table() if line not in lines] == []
    inside = sum(judged(row).is_inside for row in ROWS)
    assert f"{inside} of the {len(ROWS)} published peaks are inside" in text


def test_published_rows_have_a_source_and_the_figure_of_their_size():
    for row in ROWS:
        assert row["source"].startswith("https://"), row["name"]
        assert float(row["figure"].split()[0]) == row["size"], row["name"]
    assert len({row["name"] for row in ROWS}) == len(ROWS)


def test_no_prediction_is_wrong_by_more_than_half():
    errors = [one.error for one in map(judged, ROWS)]

    assert max(map(abs, errors)) < 0.5


if __name__ == "__main__":
    print("\n".join(table()))
