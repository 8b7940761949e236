"""Published peaks of others against the predicted intervals.

The table of benchmarks/results/published-peaks.md must have the same values, and docs/fit.md has their number.
``python tests/unit/test_fit_published.py`` prints the table.
"""

import json
from dataclasses import replace

from benchmarks.memory.peers import THEORY, peers
from benchmarks.memory.published import ROOT, SETS, judged, published
from effllm.memory.estimate import ByteRange

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


def test_last_digit_of_a_figure_is_rounded():
    one = replace(judged(ROWS[0]), size=20e9, half=0.05e9, found=ByteRange(20.04e9, 21e9, 22e9))

    assert one.is_inside
    assert not replace(one, half=0.03e9).is_inside
    assert judged({**ROWS[0], "figure": "55", "size": 55, "unit": "GB"}).half == 0.5e9
    assert judged({**ROWS[0], "model": "no such model"}) is None


def test_report_has_each_set_of_rows_and_names_an_estimator_that_is_not_installed(tmp_path):
    [megatron] = [one for one in peers(tmp_path) if one.name.startswith("Megatron")]

    lines = list(published([megatron]))

    for name in SETS:
        assert any(line.startswith(f"| {name} | all | ") for line in lines)
        assert f"left out (no theoretical_memory_usage.py): {megatron.get}" in "".join(lines)


def test_function_of_a_checkout_of_megatron_is_called(tmp_path):
    (tmp_path / THEORY).parent.mkdir(parents=True)
    text = "from .utils import print_rank_0\ndef report_theoretical_memory(args, batches):\n    return 0, 0, args.{}\n"
    (tmp_path / THEORY).write_text(text.format("hidden_size"))
    [megatron] = [one for one in peers(tmp_path) if one.name.startswith("Megatron")]
    one = judged(ROWS[0])

    assert megatron.estimate(one.shape, one.plan) == one.shape.hidden * 2**20


if __name__ == "__main__":
    print("\n".join(table()))
