"""`effllm compare`: sides, words, unfair differences, conditions, hostile input."""

import io
import json
import random
import shutil
import sys
import time

import pytest
from rich.console import Console

from effllm.analysis.compared_metrics import all_metrics
from effllm.analysis.earlier_runs import earlier_runs
from effllm.analysis.run_folders import find_runs
from effllm.analysis.sides import read_runs
from effllm.commands.compare import CompareRequest, comparison_page, main
from effllm.views.comparison_text import ComparisonScreen
from tests.run_folders import copy_golden, write_run

SPEED, ENERGY = "run_throughput/tokens_per_second", "run_energy/joules_per_token"
WINDOW_SPEED = "throughput/tokens_per_second"


def compare(*sides, form="json", **options):
    known = {
        "by": "",
        "baseline": "",
        "metrics": [],
        "conditions": [],
        "ledger": "none",
        "runs": "",
        "inside": "",
        "form": form,
    }
    return main(CompareRequest([str(side) for side in sides], **{**known, **options}))


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


def rows(document):
    return {row["metric"]: row for row in document["comparisons"][0]["metrics"]}


def test_a_faster_side_is_better_and_one_with_more_energy_is_worse(tmp_path, compared):
    a, b = tmp_path / "a", tmp_path / "b"
    for at, noise in enumerate([0.999, 1.0, 1.001]):
        write_run(a / f"a{at}", {SPEED: 1000 * noise, ENERGY: 0.5 / noise})
        write_run(b / f"b{at}", {SPEED: 1050 * noise, ENERGY: 0.55 / noise})

    found = rows(compared(a, b)[0])

    assert found["tokens_per_second"]["word"] == "better"
    assert found["tokens_per_second"]["share"] == pytest.approx(0.05)
    assert found["joules_per_token"]["word"] == "worse"


def test_noise_is_not_distinguishable_and_the_detectable_effect_is_stated(tmp_path, compared):
    a = write_side(tmp_path, "a", [1000, 1010, 990])
    b = write_side(tmp_path, "b", [1005, 1012, 994])

    row = rows(compared(a, b)[0])["tokens_per_second"]

    assert row["word"] == "not distinguishable"
    assert 0.02 < row["detectable_share"] < 0.06  # 3.5 times a spread of 1 %


def test_one_run_a_side_without_ledger_is_unknown(tmp_path, compared):
    a, b = write_side(tmp_path, "a", [1000]), write_side(tmp_path, "b", [2000])

    row = rows(compared(a, b)[0])["tokens_per_second"]

    assert row["word"] == "unknown"
    assert "3 runs a side would show differences above 3.5 times the sd" in row["reason"]


def test_one_run_a_side_is_judged_by_the_ledger(tmp_path, compared):
    a, b = write_side(tmp_path, "a", [1000]), write_side(tmp_path, "b", [1012])
    ledger = write_side(tmp_path, "ledger", [1000, 1006, 994, 1003, 997, 1001])

    row = rows(compared(a, b, ledger=str(ledger))[0])["tokens_per_second"]

    assert (row["word"], row["ledger_runs"]) == ("not distinguishable", 6)
    assert row["spread_share"] == pytest.approx(0.0042, abs=2e-4)


@pytest.mark.parametrize(("field", "value"), [("summary", {"status": "failed"}), ("run", {"precision": "fp8"})])
def test_ledger_has_only_finished_runs_of_the_same_configuration(tmp_path, compared, field, value):
    a, b = write_side(tmp_path, "a", [1000]), write_side(tmp_path, "b", [1018])
    ledger = write_side(tmp_path, "ledger", [1000, 1006, 994], **{field: value})

    assert rows(compared(a, b, ledger=str(ledger))[0])["tokens_per_second"]["word"] == "unknown"


def test_lines_of_a_ledger_file_name_the_earlier_runs(tmp_path, compared):
    """Folders that are gone, hostile or not absolute are left out; a folder in a line is not searched for runs."""
    a, b = write_side(tmp_path, "a", [1000]), write_side(tmp_path, "b", [1012])
    runs = list(write_side(tmp_path, "far", [1000, 1006, 994, 1003, 997, 1001]).iterdir())
    (tmp_path / "ledger").mkdir()
    folders = [*map(str, runs), str(tmp_path / "gone"), str(tmp_path), "relative", "/a\0b", None]
    lines = [json.dumps({"run_id": str(at), "folder": folder}) for at, folder in enumerate(folders)]
    (tmp_path / "ledger/alice.jsonl").write_text("\n".join(lines) + '\n{"run_id":"to')

    for place in ("ledger", "ledger/alice.jsonl"):
        row = rows(compared(a, b, ledger=str(tmp_path / place))[0])["tokens_per_second"]
        assert (row["word"], row["ledger_runs"]) == ("not distinguishable", 6)


def test_a_copy_of_a_compared_run_is_not_an_earlier_run(tmp_path, compared):
    a, b = write_side(tmp_path, "a", [1000]), write_side(tmp_path, "b", [1012])
    ledger = write_side(tmp_path, "ledger", [1000, 1006, 994])
    shutil.copytree(a / "a0", ledger / "copy")

    assert rows(compared(a, b, ledger=str(ledger))[0])["tokens_per_second"]["ledger_runs"] == 3


def test_ledger_without_a_run_folder_is_an_error(tmp_path, compared, capsys):
    a, b = write_side(tmp_path, "a", [1000]), write_side(tmp_path, "b", [1012])
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger/alice.jsonl").write_text('{"run_id": "x", "folder": "/gone/x"}\n')

    for place, reason in (("ledger", "a comparison needs run folders"), ("nothere", "does not exist")):
        assert main(CompareRequest([a, b], "", "", [], [], str(tmp_path / place), "", "", "json")) == 2
        assert reason in capsys.readouterr().err


def test_earlier_runs_have_the_configuration_of_their_documents(tmp_path):
    """The rows of the database and of the documents have one key, with every part of a configuration."""
    about = {"precision": "bf16", "sequence_length": 4096, "batch_size": 1e-3, "command": ["train.py", "--lr", "1e-4"]}
    write_run(tmp_path / "full", {SPEED: 1.0}, tags=["lr=1", "word", "config=é"], run=about, summary={"model": "m"})
    write_run(tmp_path / "bare", {SPEED: 1.0}, run={"ranks": {}, "command": None}, summary={"parameters": None})
    copy_golden(tmp_path / "recorded")
    found = find_runs(tmp_path)

    documents = {run.folder: run for run in read_runs(found, [])}
    rows = {run.folder: run for run in earlier_runs(found, [])}

    assert len(rows) == 3
    for folder, run in rows.items():
        assert run.configuration() == documents[folder].configuration()
        assert {run.value(one.column) for one in all_metrics()} == {
            documents[folder].value(one.column) for one in all_metrics()
        }


def test_these_two_runs_are_a_statement_of_their_own(tmp_path, capsys):
    noise = random.Random(1)
    for name, speed in (("a", 1000), ("b", 1018)):
        windows = [{WINDOW_SPEED: speed * noise.gauss(1, 0.002)} for _ in range(100)]
        write_run(tmp_path / name, {SPEED: speed}, windows=windows)

    compare(tmp_path / "a", tmp_path / "b", form="text")

    assert "these two runs differ by +1.8" in capsys.readouterr().out


def test_holm_covers_all_metrics_unless_one_is_named(tmp_path, compared):
    values = [[1000, 1003, 997], [1009, 1012, 1005]]
    names = [SPEED, ENERGY, "amu_gb", "pcu_ratio", "al_seconds", "aec_watts"]
    noise = random.Random(2)
    for side, side_values in zip("ab", values, strict=True):
        for at, value in enumerate(side_values):
            others = {name: noise.gauss(100, 1) for name in names[1:]}
            write_run(tmp_path / side / f"{side}{at}", {SPEED: value, **others})

    every = rows(compared(tmp_path / "a", tmp_path / "b")[0])["tokens_per_second"]
    alone = rows(compared(tmp_path / "a", tmp_path / "b", metrics=["tokens_per_second"])[0])["tokens_per_second"]

    assert every["p"] == alone["p"] < 0.05
    assert every["adjusted_p"] == pytest.approx(6 * every["p"])
    assert (every["word"], alone["word"]) == ("not distinguishable", "better")


def test_different_kinds_of_parameters_are_never_compared(tmp_path, compared):
    tag = "tt_tokens_per_param_per_sec"
    a = write_side(tmp_path, "a", [1.0, 1.01, 0.99], tag)
    b = write_side(tmp_path, "b", [9.0, 9.01, 8.99], tag, summary={"parameters_kind": "active"})

    document, _ = compared(a, b)

    row = rows(document)[tag]
    assert (row["word"], row["share"]) == ("unknown", None)
    assert {"name": "parameter kind", "a": "total", "b": "active"} in document["comparisons"][0]["unfair"]


def test_unfair_differences_are_listed(tmp_path, compared):
    a = write_side(tmp_path, "a", [1.0, 1.1], windows=[{"health/hottest_c": 40.0}])
    b = write_side(
        tmp_path,
        "b",
        [1.0, 1.1],
        board={"key": "GPU-2", "name": "A100", "power_limit_w": 400.0, "driver": "nvml 550", "power_profiles": "MAX_Q"},
        run={"sequence_length": 4096, "precision": "fp8", "global_batch_size": 8, "config": {"warmup": "60s"}},
        summary={"iterations": 500, "status": "failed", "losses_not_finite": 3},
        windows=[{"health/hottest_c": 70.0}],
    )

    unfair = {one["name"] for one in compared(a, b)[0]["comparisons"][0]["unfair"]}

    assert unfair >= {"GPU model", "boards", "power limit", "power profile", "driver", "sequence length", "precision"}
    assert unfair >= {"global batch size", "warm-up", "iterations", "status", "losses not finite"}
    assert "temperature in the first window (degC)" in unfair
    assert "hosts" not in unfair


def test_a_side_with_several_configurations_is_unfair(tmp_path, compared):
    for at, name in enumerate(["fast", "slow", "fast"]):
        write_run(tmp_path / "a" / f"a{at}", {SPEED: 1.0 + at}, tags=[f"config={name}"])
    b = write_side(tmp_path, "b", [1.0, 1.1])

    unfair = compared(tmp_path / "a", b)[0]["comparisons"][0]["unfair"]

    assert unfair == [{"name": "several configurations on a side", "a": "fast | slow", "b": "none"}]


def test_a_condition_that_is_known_of_one_side_alone_is_listed(tmp_path, compared):
    a = write_side(tmp_path, "a", [1.0, 1.1], windows=[{"health/hottest_c": 40.0}])
    b = write_side(tmp_path, "b", [1.0, 1.1], windows=[{}])

    unfair = compared(a, b)[0]["comparisons"][0]["unfair"]

    assert unfair == [{"name": "temperature in the first window (degC)", "a": "40", "b": "unknown"}]


def test_errors_of_other_sensors_hide_a_small_difference(tmp_path, compared):
    values = [[100, 100.1, 99.9], [102, 102.1, 101.9]]
    a = write_side(tmp_path, "a", values[0], ENERGY, sensor_error=5.0)
    same = write_side(tmp_path, "same", values[1], ENERGY, sensor_error=5.0)
    other = write_side(tmp_path, "other", values[1], ENERGY, sensor_error=5.0, board={"key": "GPU-2"})

    assert rows(compared(a, same)[0])["joules_per_token"]["word"] == "worse"
    row = rows(compared(a, other)[0])["joules_per_token"]
    assert (row["word"], "sensors" in row["reason"]) == ("not distinguishable", True)


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

    assert compared(a, b, conditions=[condition])[1] == status


def test_a_running_run_is_judged_by_an_always_valid_interval(tmp_path, compared):
    noise = random.Random(3)
    ledger = write_side(tmp_path, "ledger", [1000 * noise.gauss(1, 0.002) for _ in range(8)])
    a = write_side(tmp_path, "a", [1000])
    for name, count in (("b", 100), ("c", 10)):
        windows = [{WINDOW_SPEED: 1100 * noise.gauss(1, 0.01)} for _ in range(count)]
        running = {"status": "running", "is_over": False}
        write_run(tmp_path / name, {SPEED: 1100}, summary=running, windows=windows)

    row = rows(compared(a, tmp_path / "b", ledger=str(ledger))[0])["tokens_per_second"]
    early = rows(compared(a, tmp_path / "c", ledger=str(ledger))[0])["tokens_per_second"]

    assert (row["word"], row["always_valid"]) == ("better", True)
    assert early["word"] == "unknown"


def test_an_unfinished_campaign_is_judged_by_pairs(tmp_path, compared):
    for side, speed in (("a", 1000), ("b", 1300)):
        for at in range(4):
            tags = ["campaign=c", f"config={side}", f"repeat={at + 1}/9"]
            write_run(tmp_path / side / f"{side}{at}", {SPEED: speed + at % 2}, tags=tags)

    row = rows(compared(tmp_path / "a", tmp_path / "b")[0])["tokens_per_second"]

    assert row["always_valid"]
    assert row["reason"].startswith("4 of 9 planned repeats are complete")


def write_campaign(folder, planned, ended):
    """Write runs of two configurations, and a journal with these ends."""
    for side, speed in (("a", 1000), ("b", 1300)):
        for at in range(2):
            tags = ["campaign=c", f"config={side}", f"repeat={at + 1}/{planned}"]
            write_run(folder / f"{side}-{at + 1}", {SPEED: speed + at}, tags=tags)
    lines = [json.dumps({"key": key, "status": status, "time_s": 1.0}) for key, status in ended.items()]
    (folder / "campaign.jsonl").write_text("\n".join(lines) + '\n{"key": "b-')


@pytest.mark.parametrize("last", ["completed", "failed", "started"])
def test_repeats_are_final_after_the_end_of_the_campaign(tmp_path, compared, last):
    ended = {f"{side}-{at}": "completed" for side in "ab" for at in (1, 2, 3)} | {"b-3": last}
    write_campaign(tmp_path, 3, ended)

    row = rows(compared(tmp_path, by="config")[0])["tokens_per_second"]
    one = rows(compared(tmp_path / "a-1", tmp_path / "b-1", ledger=str(tmp_path))[0])["tokens_per_second"]

    is_open = last == "started"
    assert ("2 of 3 planned repeats are complete" in row["reason"]) == is_open
    assert (row["word"], "1 of 3 planned" in one["reason"]) == ("unknown" if is_open else "better", is_open)


def test_runs_that_are_left_out_for_one_reason_share_a_line(tmp_path, capsys):
    write_side(tmp_path, "a", [1.0, 1.1])
    write_side(tmp_path, "b", [1.0, 1.1])
    for at in range(12):
        tags = ["campaign=c", "config=b", f"repeat={at + 1}/12"]
        write_run(tmp_path / f"b/f{at:02}", {SPEED: 1.0}, tags=tags, summary={"status": "failed"})
    write_run(tmp_path / "b/warmup-1-b", {SPEED: 1.0}, tags=["warmup=b"])
    write_run(tmp_path / "a/own", {SPEED: 1.05}, tags=["warmup=2000"])

    compare(tmp_path / "a", tmp_path / "b", form="markdown")

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
    write_side(tmp_path, "a", [1000.0, 1001.0])
    write_side(tmp_path, "b", [1002.0, 1003.0], run={"git_commit": evil, "precision": evil, "run_id": evil})

    compare(tmp_path / "a", tmp_path / "b", form=form)

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
    console.print(ComparisonScreen(comparison_page(CompareRequest(["a", "b"], "", "", [], [], "none", "", "", "text"))))

    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    first, second = (line.split() for line in lines[3:5])
    assert first == ["st_samples_per_", "4.56e-06", "4.56e-06", "+0.00", "%", "not"]
    assert second == ["param_per_sec", "(-0.05", "to", "+0.05)", "distinguishable"]


def test_two_runs_of_one_name_have_their_folders(tmp_path, compared):
    for parent in ("a", "b"):
        write_run(tmp_path / parent / "run", {SPEED: 1000.0})

    document, status = compared(tmp_path / "a", tmp_path / "b")

    assert status == 0
    folders = [document["a"]["runs"][0]["folder"], document["comparisons"][0]["b"]["runs"][0]["folder"]]
    assert folders == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (["a", "a"], "same name"),
        (["a", "./a/"], "on two sides"),
        (["a"], "needs two sides"),
        (["a", "missing"], "neither a path nor a tag"),
        (["a", "empty"], "has no run"),
    ],
)
def test_wrong_sides_are_one_line_and_status_2(tmp_path, monkeypatch, compared, sides, message):
    write_run(tmp_path / "a", {SPEED: 1.0})
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)

    error, status = compared(*sides)

    assert status == 2
    assert message in error
    assert error.count("\n") == 1


def test_unknown_metrics_and_conditions_are_wrong_use(tmp_path, compared):
    a, b = write_side(tmp_path, "a", [1.0]), write_side(tmp_path, "b", [1.0])

    assert compared(a, b, metrics=["hottest_c"])[0].startswith("effllm compare: hottest_c has no better direction")
    assert "is not a metric" in compared(a, b, conditions=["nothing > 1%"])[0]
    assert compared(a, b, conditions=["tokens_per_second > 1"])[1] == 2


def test_different_sets_of_metrics_and_empty_runs_are_unknown_or_left_out(tmp_path, compared):
    a = write_side(tmp_path, "a", [1.0, 1.1])
    b = write_side(tmp_path, "b", [1.0, 1.1], ENERGY)
    write_run(tmp_path / "b" / "torn", {})
    (tmp_path / "b" / "torn" / "summary.json").write_text('{"metrics": ')

    document, _ = compared(a, b)

    found = rows(document)
    assert (found["tokens_per_second"]["word"], found["tokens_per_second"]["reason"]) == (
        "unknown",
        "not measured in B",
    )
    assert found["joules_per_token"]["reason"] == "not measured in A"
    assert "not a JSON object" in document["left_out"][0]


def test_an_old_unfinished_run_has_ended(tmp_path, compared):
    old = {"status": "running", "is_over": False, "updated_time_s": time.time() - 3600}
    a = write_side(tmp_path, "a", [1.0, 1.1], summary=old)
    b = write_side(tmp_path, "b", [1.0, 1.1])

    row = rows(compared(a, b)[0])["tokens_per_second"]

    assert row["word"] == "not distinguishable"


def test_without_the_extra_one_line_names_it(tmp_path, monkeypatch, compared):
    monkeypatch.setitem(sys.modules, "scipy.special", None)

    assert compared(tmp_path, tmp_path) == (
        "effllm compare: a comparison needs SciPy: pip install 'effllm[analysis]'\n",
        2,
    )


def test_a_value_that_failed_the_audit_is_unknown(tmp_path, compared):
    a, b = write_side(tmp_path, "a", [1000.0, 1001.0]), write_side(tmp_path, "b", [8000.0, 8001.0])
    doubtful = {"metrics": {SPEED: {"value": 8000.0, "unit": "", "doubt": "8 = gradient accumulation"}}}
    write_run(b / "b2", {}, summary=doubtful)

    row = rows(compared(a, b)[0])["tokens_per_second"]

    assert (row["word"], row["share"]) == ("unknown", None)
    assert "a check of the counts failed" in row["reason"]


def test_an_interrupted_repeat_of_a_campaign_is_left_out(tmp_path, compared):
    for side, status in (("a", "completed"), ("b", "completed"), ("b", "interrupted")):
        tags = ["campaign=c", f"config={side}", "repeat=1/1"]
        write_run(tmp_path / f"{side}-{status}", {SPEED: 1.0}, tags=tags, summary={"status": status})

    document, _ = compared(tmp_path, by="config")

    assert len(document["comparisons"][0]["b"]["runs"]) == 1
    assert "this repeat of a campaign did not complete: interrupted" in document["left_out"][0]


def test_a_repeat_that_was_run_again_is_one_run(tmp_path, compared):
    for at, (side, name) in enumerate([("a", "a-1"), ("b", "b-1"), ("b", "b-1-again-1")]):
        tags = ["campaign=c", f"config={side}", "repeat=1/1"]
        write_run(tmp_path / name, {SPEED: 1.0}, tags=tags, summary={"started_time_s": 1000.0 + at})

    document, _ = compared(tmp_path, by="config")

    assert [run["run_id"] for run in document["comparisons"][0]["b"]["runs"]] == ["b-1-again-1"]
    assert document["left_out"] == [f"{tmp_path}/b-1: the same repeat was run again in b-1-again-1"]


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_a_comparison_says_that_devices_are_simulated(tmp_path, capsys, form):
    a, b = (write_side(tmp_path, name, [1.0, 1.1], summary={"simulated": True}) for name in "ab")

    compare(a, b, form=form)

    assert "SIMULATED: the values of simulated devices" in capsys.readouterr().out


def write_switching_run(folder, effect, order, windows=6):
    """Write a run with a drift of 10 %, whose loop switches a knob between 1 and 2 in this order."""
    noise = random.Random(5)
    lines = []
    for at, arm in enumerate(arm for arm in order for _ in range(windows)):
        speed = 1000 * (1 + 0.1 * at / (windows * len(order))) * (1 + (arm == "2") * effect) * noise.gauss(1, 0.002)
        lines.append({WINDOW_SPEED: speed})
    write_run(folder, {SPEED: 1000.0}, windows=lines)
    path = folder / "windows-0001.jsonl"
    documents = [json.loads(text) for text in path.read_text().splitlines()]
    arms = [arm for arm in order for _ in range(windows)]
    for document, arm in zip(documents, arms, strict=True):
        document["instruments"] = {"knob": {"count": 1, "least": float(arm), "most": float(arm)}}
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return folder


def test_a_knob_that_is_switched_inside_one_run_is_compared_by_blocks(tmp_path, compared):
    better = write_switching_run(tmp_path / "better", 0.02, "12211221122112211221")
    same = write_switching_run(tmp_path / "same", 0.0, "12211221122112211221")

    row = rows(compared(better, inside="knob")[0])["tokens_per_second"]

    assert (row["word"], row["always_valid"]) == ("better", True)
    assert row["low"] < 0.02 < row["high"] < 0.03
    assert rows(compared(same, inside="knob")[0])["tokens_per_second"]["word"] == "not distinguishable"


def test_a_knob_with_one_switch_is_unknown_and_with_one_value_an_error(tmp_path, compared):
    once = write_switching_run(tmp_path / "once", 0.02, "12")
    never = write_switching_run(tmp_path / "never", 0.02, "11")

    assert rows(compared(once, inside="knob")[0])["tokens_per_second"]["word"] == "unknown"
    assert "needs two values inside the run, but has 1: 1" in compared(never, inside="knob")[0]
    assert compared(once, never, inside="knob")[1] == 2
