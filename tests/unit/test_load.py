"""Run folders as tables: `effllm.load`."""

import shutil
from pathlib import Path

import msgspec
import pytest

import effllm
from effllm.analysis.run_folders import UnreadableRun

OLDER = Path(__file__).parents[1] / "golden" / "run_folder_1"


def write_run(folder, run=None, summary=None, **files):
    """Write a run folder; further arguments are files by name without suffix."""
    folder.mkdir(parents=True)
    for name, document in (("run.json", run), ("summary.json", summary)):
        if document is not None:
            (folder / name).write_bytes(document if isinstance(document, bytes) else msgspec.json.encode(document))
    for name, text in files.items():
        (folder / f"{name}-0001.jsonl").write_text(text)
    return folder


def values(relation, columns):
    return relation.select(columns).fetchall()


def test_a_run_of_an_older_version_has_a_row():
    run = effllm.load(OLDER)

    assert values(run.runs, "run_id, status, iterations, tokens, hosts, schema_version") == [
        ("run_folder_1", "completed", 60, 983_040, ["vm"], 1)
    ]
    assert values(run.runs, "amu_gb, job_aec_watts, run_energy_joules_per_token") == [
        (46.719785281240476, 801.0057716626557, 0.0027407190137444973)
    ]
    assert (run.summary.tokens, run.identity.run_id, run.facts["job"]) == (983_040, "run_folder_1", "42fe8bc2230f2ff3")
    assert run.skipped == []


def test_a_folder_a_glob_a_file_and_a_list_are_read(tmp_path):
    for name in ("a/one", "a/two", "b/three"):
        write_run(tmp_path / name, {"run_id": Path(name).name, "schema_version": 4}, {"status": "completed"})
    (tmp_path / "empty").mkdir()

    def ids(path):
        return [run_id for (run_id,) in effllm.load(path).runs.select("run_id").fetchall()]

    assert ids(tmp_path) == ["one", "two", "three"]
    assert ids(f"{tmp_path}/*/t*") == ["two", "three"]
    assert ids([tmp_path / "b", tmp_path / "a/one", tmp_path / "a"]) == ["three", "one", "two"]
    assert ids(tmp_path / "a/two/summary.json") == ["two"]
    assert [len(one) for one in (effllm.load(tmp_path), effllm.load(tmp_path / "a/one"))] == [3, 1]
    assert [run.identity.run_id for run in effllm.load(tmp_path)] == ["one", "two", "three"]
    assert type(effllm.load(tmp_path / "a/one")).__name__ == "LoadedRun"
    assert type(effllm.load(tmp_path / "b")).__name__ == "LoadedRuns"


def test_runs_are_selected_by_tags(tmp_path):
    for name, tags in (("one", ["team=vision", "debug"]), ("two", ["team=text"]), ("three", [])):
        write_run(tmp_path / name, {"tags": tags}, {"tags": tags})

    def ids(tags):
        return [folder.name for folder in effllm.load(tmp_path, tags=tags).folders]

    assert ids({"team": "vision"}) == ids(["debug"]) == ids(["team=vision", "debug"]) == ["one"]
    assert ids({"team": "audio"}) == []
    assert ids({}) == ["one", "three", "two"]


@pytest.mark.parametrize("path", ["missing", "empty", "missing*", []])
def test_paths_without_a_run_raise_one_line(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()

    with pytest.raises(UnreadableRun, match=r"missing|empty|no path") as error:
        effllm.load(path)
    assert "\n" not in str(error.value)


def test_unreadable_documents_are_named_and_other_runs_are_read(tmp_path):
    write_run(tmp_path / "good", {}, {"status": "completed"})
    write_run(tmp_path / "torn", {"run_id": "torn", "schema_version": 4}, b'{"status": "comp')
    write_run(tmp_path / "nothing", b"\x80\xff", b"[]")
    write_run(tmp_path / "early", {"started_time_s": 1.5e9})
    runs = effllm.load(tmp_path)

    assert sorted(values(runs.runs, "run_id, status, started_utc::VARCHAR")) == [
        ("early", None, "2017-07-14 02:40:00"),
        ("good", "completed", None),
        ("torn", None, None),
    ]
    assert {(one.path.parent.name, one.path.name) for one in runs.skipped} == {
        ("torn", "summary.json"), ("nothing", "run.json"), ("nothing", "summary.json")
    }  # fmt: skip
    assert all("\n" not in one.reason for one in runs.skipped)


def test_two_runs_of_one_name_are_two_rows(tmp_path):
    for parent in ("a", "b"):
        shutil.copytree(OLDER, tmp_path / parent / "run")
    runs = effllm.load(tmp_path)

    assert values(runs.runs, "run_id") == [("run",), ("run",)]
    assert len(set(runs.folders)) == 2
    assert len(effllm.load([tmp_path / "a", tmp_path / "a/run"])) == 1


def test_values_of_a_wrong_type_are_null(tmp_path):
    odd = {"metrics": [], "energy": 3, "goodput": {"seconds": {"kept": "x"}}, "tokens": 2**70, "loss": "nan"}
    odd |= {"tags": "word", "waterfall": {"parts": 7}, "events": {"joined": -1}, "status": ["a"]}
    write_run(tmp_path / "run", {"ranks": {"0": 7, "1": {"host": 3, "devices": 1}}}, odd)

    [row] = values(effllm.load(tmp_path / "run").runs, "tokens, loss, goodput_seconds, hosts, tags")
    assert row == (None, None, {"kept": None}, None, {})
