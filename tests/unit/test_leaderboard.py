"""`effllm leaderboard`: normalisation, the score, kinds of parameters, hostile names."""

import csv
import io

import pytest
from typer.testing import CliRunner

from effllm.analysis.leaderboard import harmonic_mean, normalised, weights_of
from effllm.commands import leaderboard
from effllm.commands.app import app
from effllm.commands.leaderboard import main
from tests.run_folders import write_run


def metrics(amu=40.0, pcu=0.8, al=1.0, tt=1.0, aec=500.0):
    return {
        "amu_gb": amu,
        "pcu_ratio": pcu,
        "al_seconds": al,
        "tt_tokens_per_param_per_sec": tt,
        "aec_watts": aec,
    }


@pytest.fixture
def board(capsys):
    def run(*runs, form="csv", by="", weights=(), quality="", floor=0.0):
        status = main([*map(str, runs)], by, weights, quality, floor, form == "markdown", form == "csv")
        out, err = capsys.readouterr()
        return (list(csv.DictReader(io.StringIO(out))) if form == "csv" and not status else out or err), status

    return run


def test_metrics_are_normalised_in_the_right_direction():
    assert normalised([1.0, 3.0, 2.0], higher_is_better=True) == [0.0, 1.0, 0.5]
    assert normalised([1.0, 3.0, 2.0], higher_is_better=False) == [1.0, 0.0, 0.5]
    assert normalised([2.0, 2.0], higher_is_better=True) is None


def test_score_is_the_weighted_harmonic_mean():
    assert harmonic_mean([0.5, 1.0], [1.0, 1.0]) == pytest.approx(2 / (1 / 0.5 + 1))
    assert harmonic_mean([0.5, 1.0], [3.0, 1.0]) == pytest.approx(4 / (3 / 0.5 + 1))
    assert harmonic_mean([0.0, 1.0], [1.0, 1.0]) == 0
    assert harmonic_mean([0.0, 1.0], [0.0, 1.0]) == 1
    assert harmonic_mean([0.5], [0.0]) is None


def test_the_best_configuration_is_first_and_less_power_is_better(tmp_path, board):
    write_run(tmp_path / "worst", metrics(amu=60, pcu=0.5, al=2.0, tt=0.5, aec=700))
    write_run(tmp_path / "middle", metrics(amu=50, pcu=0.6, al=1.5, tt=0.75, aec=600))
    write_run(tmp_path / "best", metrics(amu=40, pcu=0.7, al=1.0, tt=1.0, aec=500))

    rows, _ = board(tmp_path)

    assert [(row["configuration"], float(row["score"])) for row in rows] == [
        ("best", 1.0),
        ("middle", pytest.approx(0.5)),
        ("worst", 0.0),
    ]


def test_a_configuration_is_the_mean_of_its_runs(tmp_path, board):
    for at, (name, al) in enumerate([("a", 1.0), ("a", 3.0), ("b", 5.0)]):
        write_run(tmp_path / f"r{at}", metrics(al=al), tags=[f"config={name}"])

    rows, _ = board(tmp_path)

    assert [(row["configuration"], row["runs"], float(row["AL_s_per_iteration"])) for row in rows] == [
        ("config=a", "2", 2.0),
        ("config=b", "1", 5.0),
    ]


def test_total_and_active_parameters_are_never_in_one_table(tmp_path, board):
    write_run(tmp_path / "dense", metrics(tt=1.0))
    write_run(tmp_path / "moe", metrics(tt=9.0), summary={"parameters_kind": "active"})
    write_run(tmp_path / "x", metrics(tt=1.0), tags=["model=m"])
    write_run(tmp_path / "y", metrics(tt=1.0), tags=["model=m"], summary={"parameters_kind": "active"})

    text, _ = board(tmp_path / "dense", tmp_path / "moe", form="text")
    error, status = board(tmp_path / "x", tmp_path / "y", by="model")

    assert text.index("active parameters, 1 configuration") < text.index("total parameters, 1 configuration")
    assert (status, "different kinds of parameters: active, total" in error) == (2, True)


def test_simulated_devices_are_never_in_a_table_with_others(tmp_path, board):
    write_run(tmp_path / "real", metrics(al=1.0), tags=["model=m"])
    write_run(tmp_path / "test", metrics(al=0.1), tags=["model=m"], summary={"simulated": True})

    text, _ = board(tmp_path, form="text")
    rows, _ = board(tmp_path)
    error, status = board(tmp_path, by="model")

    assert "\nSIMULATED devices, total parameters, 1 configuration\n" in text
    assert {row["configuration"]: row["simulated"] for row in rows} == {"real": "false", "test": "true"}
    assert (status, "simulated devices" in error) == (2, True)


def test_a_value_in_doubt_is_marked_and_not_in_the_score(tmp_path, board):
    entries = {name: {"value": value, "unit": ""} for name, value in metrics(tt=9.0).items()}
    entries["tt_tokens_per_param_per_sec"]["doubt"] = "8 = gradient accumulation"
    write_run(tmp_path / "wrong", {}, summary={"metrics": entries})
    write_run(tmp_path / "right", metrics(tt=1.0, al=0.5))

    text, _ = board(tmp_path, form="text")
    rows, _ = board(tmp_path)

    assert " 9.00! " in text
    assert "not in the score: TT: a check of the counts failed" in text
    assert {row["configuration"]: row["in_doubt"] for row in rows} == {"wrong": "TT", "right": ""}
    assert rows[0]["configuration"] == "right"


def test_runs_that_did_not_complete_are_named(tmp_path, board):
    write_run(tmp_path / "a", metrics(al=1.0), summary={"status": "failed"})
    write_run(tmp_path / "b", metrics(al=2.0))

    text, _ = board(tmp_path, form="text")

    assert "a: status of its runs: 1 failed" in text


def test_mcr_is_from_the_facts_of_a_compressed_model(tmp_path, board):
    facts = {"original_size": 16.0, "compressed_size": 4.0, "original_perf": 0.8, "compressed_perf": 0.6}
    write_run(tmp_path / "int4", metrics(), run=facts)
    write_run(tmp_path / "bad", metrics(), run={**facts, "compressed_size": 0})

    rows, _ = board(tmp_path)

    found = {row["configuration"]: row["MCR"] for row in rows}
    assert found["bad"] == ""
    assert float(found["int4"]) == pytest.approx(3.0)  # 16 / 4 x 0.6 / 0.8


def test_a_metric_that_one_configuration_lacks_is_not_in_the_score(tmp_path, board):
    write_run(tmp_path / "a", metrics(al=1.0))
    write_run(tmp_path / "b", {"al_seconds": 2.0})

    text, _ = board(tmp_path, form="text")

    assert "score: AL, each" in text
    assert "not in the score: AMU, PCU, TT, AEC: not measured in 1 of 2 configurations" in text


def test_quality_and_outcomes_against_the_next_are_shown(tmp_path, board):
    for name, al in (("fast", 1.0), ("slow", 2.0)):
        for at in range(3):
            write_run(
                tmp_path / f"{name}{at}",
                metrics(al=al * (1 + at / 1000), tt=1 / (al * (1 + at / 1000))),
                tags=[f"config={name}"],
                run={"accuracy": 0.7 if name == "fast" else 0.75},
            )

    rows, _ = board(tmp_path, quality="accuracy")

    assert [float(row["quality"]) for row in rows] == pytest.approx([0.7, 0.75])
    assert (rows[0]["next_better"], rows[0]["next_worse"], rows[1]["next_better"]) == ("1", "0", "")


def test_weights_are_checked():
    assert weights_of(["AEC=2"])["AEC"] == 2
    assert weights_of(["AEC=0"])["AEC"] == 0
    for text in ("AEC", "AEC=-1", "X=1", "AEC=nan"):
        with pytest.raises(ValueError, match="is not a weight"):
            weights_of([text])


@pytest.mark.parametrize("form", ["text", "markdown", "csv"])
def test_names_can_inject_neither_markup_nor_formulas(tmp_path, board, form):
    write_run(tmp_path / "a", metrics(al=1.0), run={"run_id": "=1+1|<b>\x1b[31m"})
    write_run(tmp_path / "b", metrics(al=2.0))

    shown, _ = board(tmp_path, form=form)

    if form == "csv":
        assert shown[0]["configuration"].startswith("'=1+1")
    else:
        assert "\x1b" not in shown
        assert form == "text" or "<b>" not in shown.replace("\\<b\\>", "")


def test_outcomes_hold_for_all_pairs_of_the_board_together(tmp_path, board):
    for at in range(6):
        for repeat, noise in enumerate((1.0, 1.01, 0.99)):
            write_run(tmp_path / f"{at}-{repeat}", {"al_seconds": (1 + 0.03 * at) * noise}, tags=[f"config=c{at}"])

    pair, _ = board(*(tmp_path / f"{at}-{repeat}" for at in (0, 1) for repeat in range(3)))
    every, _ = board(tmp_path)

    assert pair[0]["next_better"] == "1"  # p = 0.02
    assert {row["next_better"] for row in every[:-1]} == {"0"}


def test_a_board_on_80_columns_cuts_nothing_and_has_the_outcomes_in_lines(tmp_path, monkeypatch):
    for at, (name, speed) in enumerate([("learning-rate-3e-4", 1.0), ("learning-rate-1e-4", 0.5)]):
        for repeat in range(3):
            values = metrics(tt=speed * (1 + 1e-3 * repeat)) | {"st_samples_per_param_per_sec": speed * 1e-6}
            write_run(tmp_path / f"r{at}{repeat}", values, tags=[f"config={name}"])
    monkeypatch.setattr(leaderboard, "WIDTH", 80)

    done = CliRunner().invoke(app, ["leaderboard", str(tmp_path)])

    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in done.stdout
    assert lines[2].split()[:2] == ["config=learning-rate-3e-4", "3"] or lines[2].startswith("config=")
    assert "config=learning-rate-3e-4 against config=learning-rate-1e-4: 1 better, 0 worse" in done.stdout


def test_one_configuration_and_runs_without_measurements_have_no_score(tmp_path, board):
    write_run(tmp_path / "only", metrics())
    write_run(tmp_path / "nothing", {})
    (tmp_path / "nothing/summary.json").write_text("{}")

    text, status = board(tmp_path, form="text")

    assert status == 0
    assert "no score: the configurations differ in no metric, or there is only one configuration" in text
    assert "not in the score" not in text


def test_a_board_of_runs_without_measurements_is_one_line(tmp_path, board):
    write_run(tmp_path / "nothing", {})
    (tmp_path / "nothing/summary.json").write_text("{}")

    text, status = board(tmp_path)

    assert (status, text.count("\n")) == (2, 1)
    assert "has no run with a result" in text
