"""`effllm compare`: sides, outcomes, unfair differences, conditions, hostile input."""

import io
import json
import random
import sys
import time

import numpy as np
import pytest
from cases import repeats
from rich.console import Console

from effllm.analysis.comparison import difference, holm_adjusted
from effllm.commands.compare import comparison_page, main
from tests.run_folders import write_run

SPEED, ENERGY = "run_throughput/tokens_per_second", "run_energy/joules_per_token"


def compare(*sides, form="json", **options):
    forms = {"as_json": form == "json", "as_markdown": form == "markdown"}
    return main(sides=[str(side) for side in sides], **options, **forms)


@pytest.fixture
def compared(capsys):
    def run(*sides, **options):
        status = compare(*sides, **options)
        out, err = capsys.readouterr()
        return json.loads(out) if out else err, status

    return run


def write_side(folder, name, values, tag=SPEED, **options):
    for at, value in enumerate(values):
        write_run(folder / name / f"{name}{at}", {tag: value}, **options)
    return folder / name


def write_sides(folder, *sides, **options):
    """Write a side for each list of values: a, b, c."""
    return [write_side(folder, name, values, **options) for name, values in zip("abc", sides, strict=False)]


def rows(document):
    return {row["metric"]: row for row in document["comparisons"][0]["metrics"]}


def speeds(document):
    """Return the compared tokens per second."""
    return rows(document)["tokens_per_second"]


def change_metrics(run, **values):
    """Replace metrics of a written summary by their last names; ``None`` removes one."""
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    for name, value in values.items():
        (tag,) = (tag for tag in summary["metrics"] if tag.endswith(name))
        summary["metrics"][tag] = value
        if value is None:
            del summary["metrics"][tag]
    path.write_text(json.dumps(summary))


def test_a_faster_side_is_better_and_one_with_more_energy_is_worse(tmp_path, compared):
    for at, noise in enumerate([0.999, 1.0, 1.001]):
        write_run(tmp_path / f"a/a{at}", {SPEED: 1000 * noise, ENERGY: 0.5 / noise})
        write_run(tmp_path / f"b/b{at}", {SPEED: 1050 * noise, ENERGY: 0.55 / noise})

    found = rows(compared(tmp_path / "a", tmp_path / "b")[0])
    assert [found[name]["outcome"] for name in ("tokens_per_second", "joules_per_token")] == ["better", "worse"]
    assert found["tokens_per_second"]["share"] == pytest.approx(0.05)


NEAR, NOT_IN_A = "not distinguishable", {"outcome": "unknown", "reason": "not measured in A", "a": None}
OUTCOMES = {
    # the detectable share is 3.5 times a spread of 1 %
    "noise": (
        [1000, 1010, 990], [1005, 1012, 994], {"outcome": NEAR, "detectable_share": pytest.approx(0.04, abs=0.02)},
    ),
    "one run a side": ([1000], [2000], {
        "outcome": "unknown", "share": pytest.approx(1.0), "low": None,
        "reason": "one run a side does not show the spread between runs: compare 3 or more runs a side",
    }),
    "few runs": ([1000, 1200], [1010, 1400], {
        "outcome": "unknown", "reason": "too few runs: a difference of 100 % may be missed", "detectable_share": None,
    }),
    "a negative value": ([-1.0] * 3, [1000, 1001, 1002], NOT_IN_A),
    "the largest number": ([1.7e308] * 3, [1000, 1001, 1002], NOT_IN_A),
    "zeros": ([0, 0, 0], [0, 0, 0], {"outcome": NEAR, "share": 0}),
    "zeros and huge values": ([0, 0, 0], [1e60, 1e60, 1e59], {"outcome": "unknown", "share": None}),
    "equal values": ([1000] * 3, [1000] * 3, {"outcome": NEAR}),
    "a thousandth": ([1000] * 3, [1001] * 3, {"outcome": "better"}),
}  # fmt: skip


@pytest.mark.parametrize(("a", "b", "expected"), OUTCOMES.values(), ids=OUTCOMES)
def test_outcome_of_two_sides(tmp_path, compared, capsys, a, b, expected):
    sides = write_sides(tmp_path, a, b)

    row = speeds(compared(*sides)[0])
    assert {name: row[name] for name in expected} == expected
    assert compare(*sides, form="text") == 0
    assert row["outcome"] in capsys.readouterr().out


def test_the_power_of_the_primary_quantity_is_printed(tmp_path, capsys):
    compare(*write_sides(tmp_path, [1000, 1010, 990], [1105, 1112, 1094]), form="text")

    assert "tokens_per_second: with 3 runs a side a difference of 2.9 % would be found" in capsys.readouterr().out


def write_throughput(folder, side, factor, energies=(1.0, 1.01, 0.99)):
    """Write three runs with metrics of throughput, power and energy."""
    for at, (noise, energy) in enumerate(zip((1.0, 1.002, 0.998), energies, strict=True)):
        speed = 1000 * factor * noise
        values = {SPEED: speed, "run_throughput/samples_per_second": speed / 10, "al_seconds": 90 / speed}
        values |= {ENERGY: energy, "run_energy/joules_per_sample": 10 * energy}
        write_run(folder / side / f"{side}{at}", values)
    return folder / side


def test_each_quantity_is_tested_once(tmp_path, compared):
    a, b = write_throughput(tmp_path, "a", 1.0), write_throughput(tmp_path, "b", 1.05)

    found = rows(compared(a, b)[0])
    assert {name: row["outcome"] for name, row in found.items()} == {
        "tokens_per_second": "better", "samples_per_second": None, "al_seconds": None,
        "joules_per_token": "not distinguishable", "joules_per_sample": None,
    }  # fmt: skip
    assert found["samples_per_second"]["share"] == pytest.approx(0.05)
    assert found["tokens_per_second"]["adjusted_p"] == found["tokens_per_second"]["p"]


def test_other_quantities_are_tested_at_a_level_that_depends_on_throughput(tmp_path, compared):
    """The saving of energy has p = 0.03: it is an outcome only if throughput differs too."""
    a, energies = write_throughput(tmp_path, "a", 1.0), (0.98, 0.966, 0.97)
    same, faster = (write_throughput(tmp_path, f"b{factor}", factor, energies) for factor in (1.0, 1.05))

    strict, usual = (rows(compared(a, b)[0])["joules_per_token"] for b in (same, faster))

    assert 0.01 < strict["p"] == usual["p"] < 0.05
    assert (strict["level"], strict["outcome"]) == (pytest.approx(0.01), "not distinguishable")
    assert (usual["level"], usual["outcome"]) == (pytest.approx(0.05), "better")


def test_other_quantities_share_their_level_by_holm(tmp_path, compared):
    names = ["amu_gb", "pcu_ratio", "aec_watts", "peak_gb"]
    for side, values in (("a", [1000, 1003, 997]), ("b", [1109, 1112, 1105])):
        noise = random.Random(side)
        for at, value in enumerate(values):
            write_run(tmp_path / side / f"{side}{at}", {SPEED: value, **{name: noise.gauss(100, 1) for name in names}})

    found = rows(compared(tmp_path / "a", tmp_path / "b")[0])
    alone = rows(compared(tmp_path / "a", tmp_path / "b", metric=["amu_gb"])[0])["amu_gb"]

    others = [found[name] for name in ("amu_gb", "pcu_ratio", "aec_watts")]
    assert min(row["adjusted_p"] for row in others) == pytest.approx(3 * min(row["p"] for row in others))
    assert (alone["adjusted_p"], alone["is_primary"]) == (found["amu_gb"]["p"], True)


@pytest.mark.parametrize(
    ("missing", "primary"),
    [("tokens_per_second", "samples_per_second"), ("samples_per_second", "tokens_per_second")],
)
def test_throughput_is_tested_by_the_first_metric_that_all_runs_have(tmp_path, compared, missing, primary):
    a, b = write_throughput(tmp_path, "a", 1.0), write_throughput(tmp_path, "b", 1.05)
    change_metrics(b / "b1", **{missing: None})

    found = rows(compared(a, b)[0])
    assert [name for name, row in found.items() if row["is_primary"]] == [primary]
    assert (found[missing]["outcome"], found[missing]["reason"]) == ("unknown", "not measured in 1 of 6 runs")


def test_several_sides_share_the_level(tmp_path, compared):
    sides = write_sides(tmp_path, *([value, value + 8, value - 8] for value in (1000, 1022, 1000)))

    alone, shared = speeds(compared(*sides[:2])[0]), speeds(compared(*sides)[0])
    assert (alone["outcome"], alone["level"]) == ("better", 0.05)
    assert (shared["outcome"], shared["level"]) == ("not distinguishable", 0.025)


def test_different_kinds_of_parameters_are_never_compared(tmp_path, compared):
    tag = "tt_tokens_per_param_per_sec"
    a = write_side(tmp_path, "a", [1.0, 1.01, 0.99], tag)
    b = write_side(tmp_path, "b", [9.0, 9.01, 8.99], tag, summary={"parameters_kind": "active"})

    document, _ = compared(a, b)

    row = rows(document)[tag]
    assert (row["outcome"], row["share"]) == ("unknown", None)
    assert {"name": "parameter kind", "a": "total", "b": "active"} in unfair(document)


def unfair(document):
    return document["comparisons"][0]["unfair"]


def test_unfair_differences_are_listed(tmp_path, compared):
    a = write_side(tmp_path, "a", [1.0, 1.1])
    b = write_side(
        tmp_path,
        "b",
        [1.0, 1.1],
        board={"key": "GPU-2", "name": "A100", "power_limit_w": 400.0, "driver": "nvml 550", "power_profiles": "MAX_Q"},
        run={"sequence_length": 4096, "precision": "fp8", "global_batch_size": 8, "config": {"warmup": "60s"}},
        summary={"iterations": 500, "status": "failed", "losses_not_finite": 3},
    )

    names = {one["name"] for one in unfair(compared(a, b)[0])}
    assert names >= {"GPU model", "boards", "power limit", "power profile", "driver", "sequence length", "precision"}
    assert names >= {"global batch size", "warm-up", "iterations", "status", "losses not finite"}
    assert "hosts" not in names


def test_a_side_with_several_configurations_is_unfair(tmp_path, compared):
    for at, name in enumerate(["fast", "slow", "fast"]):
        write_run(tmp_path / "a" / f"a{at}", {SPEED: 1.0 + at}, tags=[f"config={name}"])
    b = write_side(tmp_path, "b", [1.0, 1.1])

    assert unfair(compared(tmp_path / "a", b)[0]) == [
        {"name": "several configurations on a side", "a": "fast | slow", "b": "none"}
    ]


def test_a_condition_that_is_known_of_one_side_alone_is_listed(tmp_path, compared):
    a = write_run(tmp_path / "a", {SPEED: 1.0, "run_health/sm_clock_mhz": 1400.0})
    b = write_run(tmp_path / "b", {SPEED: 1.0})

    assert unfair(compared(a, b)[0]) == [{"name": "SM clock (MHz)", "a": "1400", "b": "unknown"}]


def test_errors_of_other_sensors_hide_a_small_difference(tmp_path, compared):
    values = [[100, 100.1, 99.9], [102, 102.1, 101.9]]
    a = write_side(tmp_path, "a", values[0], ENERGY, sensor_error=5.0)
    same = write_side(tmp_path, "same", values[1], ENERGY, sensor_error=5.0)
    other = write_side(tmp_path, "other", values[1], ENERGY, sensor_error=5.0, board={"key": "GPU-2"})

    assert rows(compared(a, same)[0])["joules_per_token"]["outcome"] == "worse"
    row = rows(compared(a, other)[0])["joules_per_token"]
    assert (row["outcome"], "sensors" in row["reason"]) == ("not distinguishable", True)


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        ("tokens_per_second < -3%", 1),
        ("tokens_per_second < -5%", 3),
        ("tokens_per_second < -8%", 0),
        ("tokens_per_second > +1%", 0),
        ("joules_per_token > +1%", 3),
    ],
)
def test_exit_status_for_true_false_and_unknown(tmp_path, compared, condition, status):
    a, b = write_side(tmp_path, "a", [1000, 1003, 997]), write_side(tmp_path, "b", [950, 953, 947])

    assert compared(a, b, fail_if=[condition])[1] == status


@pytest.mark.parametrize("running", ["a", "b"])
def test_no_statistics_over_a_running_run(tmp_path, compared, running):
    sides = write_sides(tmp_path, *[[1000, 1001, 1002]] * 2)
    write_run(tmp_path / running / "now", {SPEED: 2000}, summary={"status": "running", "is_over": False})

    row = speeds(compared(*sides)[0])
    assert (row["outcome"], row["reason"], row["p"]) == ("unknown", "a run continues: compare after its end", None)


def write_repeat(folder, config, repeat="1/1", speed=1.0, **summary):
    """Write a run of a campaign."""
    tags = ["campaign=c", f"config={config}", f"repeat={repeat}"]
    return write_run(folder, {SPEED: speed}, tags=tags, summary=summary)


@pytest.mark.parametrize("planned", [2, 3])
def test_repeats_that_a_campaign_has_planned_and_not_made_are_a_warning(tmp_path, compared, planned):
    for side, speed in (("a", 1000), ("b", 1300)):
        for at in range(2):
            write_repeat(tmp_path / f"{side}-{at + 1}", side, f"{at + 1}/{planned}", speed + at)

    document, _ = compared(tmp_path, by="config")
    assert speeds(document)["outcome"] == "better"
    assert len(document["warnings"]) == (2 if planned == 3 else 0)
    assert all("has 2 of 3 planned repeats" in line for line in document["warnings"])


def test_runs_that_are_left_out_for_one_reason_share_a_line(tmp_path, capsys):
    a, b = write_sides(tmp_path, *[[1.0, 1.1]] * 2)
    for at in range(12):
        write_repeat(b / f"f{at:02}", "b", f"{at + 1}/12", status="failed")
    write_run(b / "warmup-1-b", {SPEED: 1.0}, tags=["warmup=b"])
    write_run(a / "own", {SPEED: 1.05}, tags=["warmup=2000"])
    compare(a, b, form="markdown")

    out = capsys.readouterr().out
    assert "b/warmup-1-b: a warm-up run of a campaign" in out
    assert "a \\(3 runs\\)" in out, "the tag of a user is not the tag of a campaign"
    assert "12 runs: this repeat of a campaign did not complete: failed" in out
    assert "f09 and 2 more" in out


def test_runs_are_grouped_by_a_tag_or_a_fact(tmp_path, compared):
    for at, rate in enumerate(["1e-4", "3e-4", "1e-4"]):
        write_run(tmp_path / f"r{at}", {SPEED: 1000.0 + at}, tags=[f"lr={rate}"], run={"git_commit": f"c{at % 2}"})

    by_tag, _ = compared(tmp_path, by="lr", baseline="lr=3e-4")
    by_commit, _ = compared(tmp_path, by="git_commit")
    tags, _ = compared("lr=1e-4", "lr=3e-4", runs=str(tmp_path))

    assert (by_tag["a"]["name"], len(by_tag["comparisons"][0]["b"]["runs"])) == ("lr=3e-4", 2)
    assert by_commit["a"]["name"] == "git_commit=c0"
    assert len(tags["a"]["runs"]) == 2


@pytest.mark.parametrize("form", ["text", "markdown", "json"])
def test_names_cannot_inject_markup_or_control_characters(tmp_path, capsys, form):
    evil = "x\x1b[31m\nFAKE|<script>[link](http://a)"
    a = write_side(tmp_path, "a", [1000.0, 1001.0])
    b = write_side(tmp_path, "b", [1002.0, 1003.0], run={"git_commit": evil, "precision": evil, "run_id": evil})
    compare(a, b, form=form)

    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\nFAKE" not in out
    if form == "markdown":
        assert "<script>" not in out.replace("\\<script\\>", "")
        assert "](" not in out


def test_no_number_is_cut_on_a_terminal_of_80_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # short names of the sides, also where tmp_path is long
    for name in "ab":
        write_side(tmp_path, name, [4.561e-6, 4.562e-6, 4.563e-6], tag="st_samples_per_param_per_sec")
    console = Console(file=io.StringIO(), width=80)
    console.print(comparison_page(["a", "b"]))

    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    first, second = (line.split() for line in lines[3:5])
    assert first == ["st_samples_per_", "4.56e-06", "4.56e-06", "+0.00", "%", "not"]
    assert second == ["param_per_sec", "(-0.05", "to", "+0.05)", "distinguishable"]


def test_two_runs_of_one_name_have_their_folders(tmp_path, compared):
    a, b = (write_run(tmp_path / parent / "run", {SPEED: 1000.0}) for parent in "ab")

    document, status = compared(a.parent, b.parent)
    runs = *document["a"]["runs"], *document["comparisons"][0]["b"]["runs"]
    assert (status, [run["folder"] for run in runs]) == (0, [str(a), str(b)])


@pytest.mark.parametrize(
    ("sides", "options", "message", "expected"),
    [
        (["a", "a"], {}, "same name", 2),
        (["a", "./a/"], {}, "on two sides", 2),
        (["a"], {}, "needs two sides", 2),
        (["a", "missing"], {}, "neither a path, a run nor a tag", 1),
        (["a", "empty"], {}, "has no run", 1),
        (["a", "b"], {"metric": ["hottest_c"]}, "effllm compare: hottest_c has no better direction", 2),
        (["a", "b"], {"fail_if": ["nothing > 1%"]}, "is not a metric", 2),
        (["a", "b"], {"fail_if": ["tokens_per_second > 1"]}, "tokens_per_second > 1", 2),
    ],
)
def test_wrong_use_is_one_line_with_a_status(tmp_path, monkeypatch, compared, sides, options, message, expected):
    for name in "ab":
        write_run(tmp_path / name, {SPEED: 1.0})
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)

    error, status = compared(*sides, **options)
    assert (status, message in error, error.count("\n")) == (expected, True, 1)


def test_an_old_unfinished_run_has_ended(tmp_path, compared):
    old = {"status": "running", "is_over": False, "updated_time_s": time.time() - 3600}

    row = speeds(compared(*write_sides(tmp_path, *[[1.0, 1.1]] * 2, summary=old))[0])
    assert row["outcome"] == "not distinguishable"


def test_without_the_extra_one_line_names_it(tmp_path, monkeypatch, compared):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)

    line = "effllm compare: a comparison needs SciPy: pip install 'effllm[analysis]'\n"
    assert compared(tmp_path, tmp_path) == (line, 2)


def test_a_value_that_failed_the_audit_is_unknown(tmp_path, compared):
    a, b = write_sides(tmp_path, [1000.0, 1001.0], [8000.0, 8001.0])
    doubtful = {"value": 8000.0, "unit": "", "doubt": "8 = gradient accumulation"}
    change_metrics(b / "b1", tokens_per_second=doubtful)

    row = speeds(compared(a, b)[0])
    assert (row["outcome"], row["share"]) == ("unknown", None)
    assert "a check of the counts failed" in row["reason"]


def test_a_repeat_that_was_run_again_is_one_run(tmp_path, compared):
    for at, name in enumerate(["a-1", "b-1", "b-1-again-1"]):
        write_repeat(tmp_path / name, name[0], started_time_s=1000.0 + at)

    document, _ = compared(tmp_path, by="config")
    assert [run["run_id"] for run in document["comparisons"][0]["b"]["runs"]] == ["b-1-again-1"]
    assert document["left_out"] == [f"{tmp_path}/b-1: the same repeat was run again in b-1-again-1"]


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_a_comparison_says_that_devices_are_simulated(tmp_path, capsys, form):
    compare(*write_sides(tmp_path, *[[1.0, 1.1]] * 2, summary={"simulated": True}), form=form)

    assert "SIMULATED: the values of simulated devices" in capsys.readouterr().out


def test_difference_is_welchs():
    found = difference([1.0, 2.0, 4.0], [3.0, 3.5, 9.0, 4.0])

    # Variances 7/3 and 7.7292 over 3 and 4 runs.
    assert found.estimate == pytest.approx(4.875 - 7 / 3)
    assert found.standard_error == pytest.approx((7 / 9 + 7.72917 / 4) ** 0.5, rel=1e-5)
    assert found.df == pytest.approx((7 / 9 + 1.9323) ** 2 / ((7 / 9) ** 2 / 2 + 1.9323**2 / 3), rel=1e-4)
    low, high = found.interval()
    assert (low + high) / 2 == pytest.approx(found.estimate)
    assert found.p > 0.05 and low < 0 < high


def test_a_side_without_repeats_gives_no_difference():
    assert difference([1.0], [2.0]) is None
    assert difference([1.0, 1.1], [2.0]) is None


def test_values_without_spread_differ_for_certain_or_not_at_all():
    assert difference([3.0, 3.0], [4.0, 4.0]).p == 0
    assert difference([3.0, 3.0], [3.0, 3.0]).p == 1


def test_holm_adjusts_the_smallest_first_and_never_reverses():
    assert holm_adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm_adjusted([0.9, 0.5]) == pytest.approx([1.0, 1.0])
    assert holm_adjusted([]) == []


@pytest.mark.parametrize(("runs", "effect"), [(3, 3.52), (5, 2.10), (8, 1.52)])
def test_median_detectable_effect_is_what_80_percent_of_comparisons_find(runs, effect):
    """In standard deviations between runs; a difference of this size was found in 80 % of 200,000 simulated pairs."""
    random = np.random.default_rng(1)
    stated = [difference(*random.normal(0, 1, (2, runs))).detectable() for _ in range(repeats(300, 1000))]

    assert np.median(stated) == pytest.approx(effect, rel=0.15)
