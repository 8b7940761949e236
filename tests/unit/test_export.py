"""`effllm runs --export`: Parquet, CSV and JSON Lines of runs."""

import csv
import json
from pathlib import Path

import duckdb
import pytest
from run_folders import GOLDEN, change_document, copy_golden

import effllm
from effllm.analysis.column import COLUMNS
from effllm.analysis.export import export_parquet
from effllm.commands.run_query import export_runs as export


def make_run(folder, **fields):
    """Copy the golden run and change fields of its documents."""
    copy_golden(folder)
    for name in ("run.json", "summary.json"):
        change_document(folder / name, **{"tags": [], **fields})
    return folder


def dataset(folder, table, columns="*"):
    files = f"read_parquet('{folder}/v5/{table}/*/*/*.parquet', hive_partitioning=true)"
    return duckdb.sql(f"SELECT {columns} FROM {files} ORDER BY ALL").fetchall()


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns the exit status, stdout and stderr."""

    def run(*paths, to):
        status = export([str(path) for path in paths], str(to))
        return status, *capsys.readouterr()

    return run


def test_dataset_has_all_rows_partitioned_by_project_and_month(tmp_path, run):
    make_run(tmp_path / "runs/a", tags=["project=llama"], started_time_s=1.7e9)
    make_run(tmp_path / "runs/b", account="a/b=c ü", started_time_s=1.7e9)
    make_run(tmp_path / "runs/c", started_time_s=None, account=None)
    out = tmp_path / "out"

    assert run(tmp_path / "runs", to=out)[::2] == (0, "")
    assert dataset(out, "runs", "run_id, project, month") == [
        ("a", "llama", "2023-11"), ("b", "a/b=c ü", "2023-11"), ("c", None, None)
    ]  # fmt: skip
    runs = effllm.load(tmp_path / "runs")
    for table in COLUMNS:
        assert len(dataset(out, table)) == len(getattr(runs, table))
    # A sum of floats depends on the order of the rows.
    sums = "sum(tokens), round(sum(energy_j), 6)"
    assert dataset(out, "windows", sums) == runs.sql(f"SELECT {sums} FROM windows").fetchall()
    assert {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_dir()} == {0o700}


def test_columns_of_the_dataset_are_the_documented_columns(tmp_path):
    export_parquet(effllm.load(GOLDEN), tmp_path)

    for table in COLUMNS:
        described = duckdb.sql(f"DESCRIBE FROM read_parquet('{tmp_path}/v5/{table}/*/*/*.parquet')").fetchall()
        expected = {one.name: one.type.replace("JSON", "VARCHAR") for one in COLUMNS[table]}
        assert {name: kind for name, kind, *_ in described if name != "month"} == (
            expected if table == "runs" else {**expected, "project": "VARCHAR"}
        )


def test_export_again_replaces_rows_of_the_same_runs(tmp_path, run):
    make_run(tmp_path / "runs/a")
    make_run(tmp_path / "runs/b")
    for path in (tmp_path / "runs", tmp_path / "runs/a", tmp_path / "runs"):
        assert run(path, to=tmp_path / "out")[0] == 0

    assert [row[:2] for row in dataset(tmp_path / "out", "runs", "run_id, status")] == [
        ("a", "completed"), ("b", "completed")
    ]  # fmt: skip
    assert len(dataset(tmp_path / "out", "events")) == 2 * len(effllm.load(GOLDEN).events)


def test_names_of_projects_stay_inside_the_dataset(tmp_path, run):
    for number, project in enumerate(["../../x", "/etc", ".", "a\nb", "'; DROP", "[*?]", "%2e", "ü" * 200, ""]):
        make_run(tmp_path / f"runs/{number}", account=project)

    assert run(tmp_path / "runs", to=tmp_path / "out")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "out", "cache"}
    projects = [project for (project,) in dataset(tmp_path / "out", "runs", "project")]
    assert len(projects) == 9 and {"../../x", "/etc", "%2e", "[*?]"} <= set(projects)


def test_csv_has_one_row_per_run_and_grows(tmp_path, run):
    path = tmp_path / "all.csv"
    make_run(tmp_path / "a", user="=HYPERLINK(1)", job_name="x\x1b[2J\ny")

    assert run(tmp_path / "a", to=path) == (0, f"1 row was appended to {path}\n", "")
    assert run(tmp_path / "a", to=path)[1] == f"0 rows were appended to {path}; 1 was in the file already\n"
    assert run(GOLDEN, to=path)[0] == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [one.name for one in COLUMNS["runs"]]
    assert [(row["run_id"], row["tokens"], row["user"], row["job_name"]) for row in rows] == [
        ("a", "840000", "'=HYPERLINK(1)", "x [2J y"), ("run_folder_5", "840000", "alice", "pretrain")
    ]  # fmt: skip
    assert json.loads(rows[0]["goodput_seconds"])["kept"] > 0


def test_csv_with_other_columns_is_not_changed(tmp_path, run):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")

    assert run(GOLDEN, to=path) == (1, "", f"effllm runs: {path} has other columns (without run_id)\n")
    assert path.read_text() == "a,b\n1,2\n"


def test_json_has_one_object_per_run(tmp_path, run):
    path = tmp_path / "runs.jsonl"

    assert run(GOLDEN, to=path)[0] == run(GOLDEN, to=path)[0] == 0
    [line] = path.read_text().splitlines()
    document = json.loads(line)
    assert (document["run_id"], document["account"], document["hosts"]) == ("run_folder_5", "nlp", ["vm"])
    assert document["config"]["device"] == "nvml"


@pytest.mark.parametrize("form", ["", ".jsonl"])
def test_place_that_is_no_file_or_folder_is_one_line(tmp_path, run, form):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.jsonl" if form else tmp_path / "file"
    status, out, err = run(GOLDEN, to=path)

    assert (status, out, err.count("\n")) == (1, "", 1)
    assert run(GOLDEN, to="/dev/null")[0] == 1
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("form", ["", ".jsonl", ".csv"])
def test_names_with_glob_characters_and_quotes_are_places(tmp_path, run, form):
    place = tmp_path / "it's [1]*?"
    place.mkdir()

    assert [run(GOLDEN, to=place / f"out{form}")[0] for _ in range(2)] == [0, 0]
    assert list(tmp_path.iterdir()) == [place]
    place.rename(tmp_path / "plain")
    if not form:
        assert len(dataset(tmp_path / "plain/out", "runs")) == 1
