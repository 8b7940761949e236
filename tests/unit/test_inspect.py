"""``effllm inspect``: the waterfall of a run folder as a table and as JSON."""

import json
import os

import pytest
from run_folders import write_files
from sink_examples import make_summary
from typer.testing import CliRunner

from effllm.commands.app import app
from effllm.job.verdict import MAX_EVIDENCE
from effllm.records.framework_figures import FIGURES
from effllm.records.verdict import (
    PARTS,
    Audit,
    ComparedFigure,
    Evidence,
    LossWindows,
    Verdict,
    Waterfall,
    WaterfallPart,
)


@pytest.fixture
def inspect(tmp_path):
    """Write a summary with a waterfall, and call the command with options."""

    def run(found, *options, **changes):
        folder = write_files(tmp_path / "run", summary=make_summary(waterfall=found, **{"verdict": None, **changes}))
        return CliRunner().invoke(app, ["inspect", str(folder), *options])

    return run


def of(*parts, unknown=()):
    total = sum(seconds for _, seconds, _ in parts)
    made = [WaterfallPart(name, seconds, seconds / total, joules, max_gain=0.125) for name, seconds, joules in parts]
    return Waterfall(total, sum(joules for _, _, joules in parts), tuple(made), "GPU", unknown)


def test_table_has_a_line_for_each_part_and_each_unknown_quantity(inspect):
    found = of(("data", 3600.0, 7.2e6), ("steps", 10800.0, 3.6e6), unknown=("useful work: no peak",))

    lines = [" ".join(line.split()) for line in table(inspect(found))]
    assert lines[:2] == ["part share GPU-hours kWh gain", "data 25.0 % 1.00 2.00 12.5 %"]
    assert lines[2].startswith("steps 75.0 % 3.00 1.00")
    assert lines[-1] == "unknown: useful work: no peak"


def test_short_run_is_shown_in_seconds_and_joules(inspect):
    lines = [" ".join(line.split()) for line in table(inspect(of(("data", 1.5, 30.0))))]

    assert lines[0] == "part share GPU-seconds J gain"
    assert lines[1].startswith("data 100.0 % 1.50 30.0")


def table(done):
    """Return the lines from the header of the table on."""
    lines = done.stdout.splitlines()
    return lines[next(at for at, line in enumerate(lines) if line.startswith("part ")) :]


def test_table_with_all_parts_has_lines_of_at_most_80_columns(inspect):
    parts = [WaterfallPart(name, 123456.0, 0.05, 9.9e9, True, 99999.0, 12.5) for name in PARTS]

    found = Waterfall(1e8, 1e12, tuple(parts), "rank", ("useful work: " + "x " * 60,))
    done = inspect(found)
    lines = table(done)

    assert lines[0].split()[:4] == ["part", "share", "rank-hours", "kWh"]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [line.split("  ")[0] for line in lines[1 : 1 + len(PARTS)]] == [name.replace("_", " ") for name in PARTS]


def test_verdict_is_first_then_the_numbers_and_its_evidence_is_last(inspect):
    lines = inspect(of(("data", 1.0, 1.0)), verdict=make_summary().verdict).stdout.splitlines()

    names = [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert names == ["Verdict", "Why", "Next", "Result", "Energy", "Paper", "Ran"]
    assert lines[1] == "  Verdict  data loading: 8.0 % of GPU time, gain at most 8.7 %"
    assert "30.8 mJ/token ±0.01 % timing ±5 % sensor, 2.80 kWh " in " ".join(" ".join(lines).split())
    evidence = " ".join(" ".join(lines[-2:]).split())
    assert evidence == "evidence: data loading 8.0 % of GPU time (summary.json: waterfall.parts, name data)"


def test_json_has_the_stable_names_and_the_whole_verdict(inspect):
    done = json.loads(inspect(of(("data", 1.0, 1.0)), "--json", verdict=make_summary().verdict).stdout)

    assert list(done) == ["run", "verdict", "waterfall", "evidence", "audit", "host", "versions"]
    assert list(done["verdict"]) == ["cause", "text", "why", "next", "bound", "confidence"]
    assert done["evidence"][0]["share"] == 0.08


NUMBERS = (1234567.89012345, 0.0512345678901, 9.87654321012e9, True, 99999.123456789, 0.123456789012)


def test_json_is_shorter_than_8_kb_and_has_all_names_and_numbers(inspect):
    figures = tuple(ComparedFigure(name, 1234.56789, 123.456789, 8.0, 64) for name in FIGURES)
    parts = tuple(WaterfallPart(name, *NUMBERS, "\u65e5" * 300, 0.0123456789012) for name in PARTS)
    seen = LossWindows(123_456, 123_456, 123_456, 123_456, 0.123456789)
    evidence = tuple(Evidence("c" * 250, f"summary.json: {at}", 0.1, seen) for at in range(MAX_EVIDENCE))
    verdict = Verdict("data_loading", "t" * 62, "w" * 200, "n" * 62, 0.123456789, "medium", evidence)
    found = Waterfall(1e8, 1e12, parts, "GPU", ("useful work: " + "x " * 60,) * 3)

    done = inspect(found, "--json", verdict=verdict, audit=Audit(figures, ("d" * 150,) * 2, 9))

    found = json.loads(done.stdout)
    assert len(done.stdout) < 8001
    assert [part["name"] for part in found["waterfall"]["parts"]] == list(PARTS)
    assert [(one["source"], one["windows"]["count"]) for one in found["evidence"]][4] == ("summary.json: 4", 123_456)
    assert [(one["name"], one["factor"]) for one in found["audit"]["figures"]] == [(name, 8.0) for name in FIGURES]
    assert found["verdict"]["why"] == verdict.why


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "does not exist"),
        (b"{", "cannot be read: not a JSON object"),
        (make_summary(), "has no waterfall"),
        (make_summary(schema_version=3), "cannot be read: it has schema_version 3"),
    ],
)
def test_folder_without_a_waterfall_is_reported_in_one_line(tmp_path, content, line):
    done = CliRunner().invoke(app, ["inspect", str(write_files(tmp_path / "run", summary=content))])

    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert line in done.stderr


def test_of_a_folder_of_runs_the_last_one_is_shown(tmp_path):
    for name, time_s in (("one", 200), ("two", 100)):
        os.utime(write_files(tmp_path / name, {}, b"{") / "run.json", (time_s, time_s))

    done = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert done.stderr.startswith(f"effllm inspect: {tmp_path}/one/summary.json cannot be read")


def test_control_characters_and_markup_of_a_summary_are_not_interpreted(inspect):
    found = of(("data\x1b[2J", 1.0, 1.0), unknown=("[/x]\x1b]0;title\x07",))

    done = inspect(found, status="[/red]\x1b[2J")

    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert "[/red]" in done.stdout
