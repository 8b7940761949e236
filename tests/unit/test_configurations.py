"""`effllm compare`: the table of configurations, the score of the paper, forms, hostile names."""

import csv
import io

import pytest
from typer.testing import CliRunner

from effllm.commands.app import app
from tests.run_folders import write_run


def metrics(amu=40.0, pcu=0.8, al=1.0, tt=1.0, aec=500.0):
    return {"amu_gb": amu, "pcu_ratio": pcu, "al_seconds": al, "tt_tokens_per_param_per_sec": tt, "aec_watts": aec}


def shown(*arguments, status=0, width="200"):
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": width})
    assert done.exit_code == status, done.output
    return done.output


def table(*arguments):
    """Return the rows of the CSV by configuration."""
    return {row["configuration"]: row for row in csv.DictReader(io.StringIO(shown(*arguments, "--csv")))}


@pytest.fixture
def three(tmp_path):
    """Three configurations of three runs, of which the first is the best in everything."""
    for at, name in enumerate(("fast", "middle", "slow"), 1):
        for repeat in range(3):
            noise = 1 + repeat / 100
            values = metrics(40.0 + at, 0.9 - at / 10, at * noise, 1 / (at * noise), 500 + at)
            values["run_throughput/tokens_per_second"] = 1000 / (at * noise)
            write_run(tmp_path / f"{name}{repeat}", values, tags=[f"config={name}"])
    return tmp_path


def test_score_is_the_harmonic_mean_and_the_best_configuration_is_first(three):
    rows = table(three, "--paper")

    assert list(rows) == ["config=fast", "config=middle", "config=slow"]
    assert [float(rows[name]["score"]) for name in rows][::2] == [1.0, 0.0]
    # TT of 1, 1/2 and 1/3 has the normalised value 0.25; the others have 0.5.
    assert float(rows["config=middle"]["score"]) == pytest.approx(5 / (4 / 0.5 + 1 / 0.25), rel=0.01)
    assert "score: AMU, PCU, AL, TT, AEC, each from 0 (worst) to 1 (best); harmonic mean" in shown(three, "--paper")


def test_mean_has_a_95_percent_interval_over_runs(three):
    row = table(three, "--paper")["config=fast"]

    # Student's t of 2 degrees of freedom is 4.303; the standard deviation of 1, 1.01 and 1.02 is 0.01.
    half = 4.303 * 0.01 / 3**0.5
    assert row["runs"] == "3"
    assert [float(row[f"al_seconds{end}"]) for end in ("", "_low", "_high")] == pytest.approx(
        [1.01, 1.01 - half, 1.01 + half], rel=1e-3
    )
    assert " 1.01 ± 2.5 %" in shown(three, "--paper")


def test_score_needs_three_configurations(tmp_path):
    for name, al in (("a", 1.0), ("b", 2.0)):
        write_run(tmp_path / name, metrics(al=al))

    text = shown(tmp_path, "--paper")
    assert "no score: it needs at least 3 configurations" in text
    assert "± " not in text
    assert {row["score"] for row in table(tmp_path, "--paper").values()} == {""}


def test_table_is_before_the_outcomes_of_more_than_two_sides(three):
    text = shown(three, "--by", "config")

    assert text.index("± ") < text.index("outcome")
    assert "outcome" not in shown(three, "--by", "config", "--latex")


def test_latex_has_a_row_for_each_configuration_and_escapes_names(three):
    write_run(three / "odd", metrics(), tags=["config=50%_of $x\\y"])

    text = shown(three, "--paper", "--latex")
    assert text.count(r" \\") == 5
    assert r"config=50\%\_of \$x\textbackslash{}y & 1 & 40.0 & " in text
    assert r"AL $\downarrow$" in text and r" $\pm$ 2.5 \%" in text


def test_narrow_terminal_has_a_column_for_each_configuration(three):
    lines = shown(three, "--paper", width="80").splitlines()

    assert max(map(len, lines)) <= 110  # not a terminal
    assert all(line.isascii() or "…" not in line for line in lines)


def test_kinds_of_parameters_and_simulated_devices_are_never_in_one_table(tmp_path):
    write_run(tmp_path / "dense", metrics())
    write_run(tmp_path / "moe", metrics(), summary={"parameters_kind": "active"})
    assert "different kinds of parameters: active, total; compare them apart" in shown(tmp_path, "--paper", status=2)

    write_run(tmp_path / "test", metrics(), summary={"simulated": True})
    assert "some runs are of simulated devices" in shown(tmp_path / "dense", tmp_path / "test", "--paper", status=2)


def test_value_in_doubt_is_marked_and_not_in_the_score(three):
    entries = {name: {"value": value, "unit": ""} for name, value in metrics(tt=9.0).items()}
    entries["tt_tokens_per_param_per_sec"]["doubt"] = "8 = gradient accumulation"
    write_run(three / "wrong", {}, summary={"metrics": entries}, tags=["config=wrong"])

    text = shown(three, "--paper")
    assert " 9.00! " in text
    assert "not in the score: TT: a check of the counts failed" in text
    assert table(three, "--paper")["config=wrong"]["in_doubt"] == "tt_tokens_per_param_per_sec"


def test_metric_that_a_configuration_lacks_is_not_in_the_score(three):
    write_run(three / "less", {"al_seconds": 2.0}, tags=["config=less"], summary={"status": "failed"})

    text = shown(three, "--paper")
    assert "score: AL, each" in text
    assert "not in the score: AMU: not measured in 1 of 4 configurations" in text
    assert "config=less: status of its runs: 1 failed" in text


def test_mcr_is_from_the_facts_of_a_compressed_model(tmp_path):
    facts = {"original_size": 16.0, "compressed_size": 4.0, "original_perf": 0.8, "compressed_perf": 0.6}
    for name, changes in (("int4", {}), ("bad", {"compressed_size": 0})):
        write_run(tmp_path / name, metrics(), run={**facts, **changes})

    mcr = {name: row["mcr"] for name, row in table(tmp_path, "--paper").items()}
    assert (mcr["bad"], float(mcr["int4"])) == ("", pytest.approx(3.0))  # 16 / 4 x 0.6 / 0.8


@pytest.mark.parametrize("form", [[], ["--markdown"], ["--csv"], ["--latex"]])
def test_names_can_inject_neither_markup_nor_formulas(tmp_path, form):
    write_run(tmp_path / "a", metrics(al=1.0), run={"run_id": "=1+1|<b>\x1b[31m"})

    text = shown(tmp_path, "--paper", *form)
    assert "\x1b" not in text
    if form == ["--csv"]:
        assert "'=1+1" in text
    if form == ["--markdown"]:
        assert "<b>" not in text.replace("\\<b\\>", "")


def test_table_refuses_what_only_a_comparison_has(three):
    for option in (["--json"], ["--fail-if", "al_seconds > 1%"], ["--baseline", "a"]):
        assert "print a table without outcomes" in shown(three, "--paper", *option, status=2)
    assert "two forms" in shown(three, "--paper", "--csv", "--latex", status=2)
    assert "is not a metric" in shown(three, "--csv", "--metric", "speed", status=2)


def test_further_metrics_are_columns(three):
    write_run(three / "more", metrics() | {"run_energy/joules_per_token": 3.0}, tags=["config=more"])

    assert float(table(three, "--paper", "--metric", "joules_per_token")["config=more"]["joules_per_token"]) == 3.0
    assert "joules_per_token" not in table(three, "--paper")["config=more"]
