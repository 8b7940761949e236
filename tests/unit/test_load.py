"""Run folders as tables: `effllm.load`."""

import errno
import math
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from cases import cases
from run_folders import GOLDEN, copy_golden
from run_folders import write_files as write_run
from run_lines import read_events, read_ranks, read_windows
from sink_examples import complete_totals, make_report, make_row

import effllm
from effllm import metrics
from effllm.analysis import database
from effllm.analysis.run_folders import UnreadableRun
from effllm.config.settings import cache_folder
from effllm.records.counters import FIELDS
from effllm.records.job import SCHEMA_VERSION
from effllm.store import own_files
from effllm.store.reader import RankRow
from effllm.store.run_folder import RunFolder

CORPUS = Path(__file__).parents[1] / "corpus" / "runfolder"


def values(relation, columns):
    return relation.select(columns).fetchall()


def column(relation, name):
    return [value for (value,) in values(relation, name)]


def skipped(runs):
    return [(one.path.name, one.reason) for one in runs.skipped]


def names(runs):
    return [folder.name for folder in runs.folders]


def test_a_run_has_a_row():
    run = effllm.load(GOLDEN)

    assert values(run.runs, "run_id, status, iterations, tokens, hosts, schema_version") == [
        ("run_folder_5", "completed", 60, 840_000, ["vm"], SCHEMA_VERSION)
    ]
    metrics = {tag: one.value for tag, one in run.summary.metrics.items()}
    assert values(run.runs, "amu_gb, job_aec_watts, run_energy_joules_per_token") == [
        (metrics["amu_gb"], metrics["job/aec_watts"], metrics["run_energy/joules_per_token"])
    ]
    assert (run.summary.tokens, run.identity.run_id, run.facts["model"]) == (840_000, "run_folder_5", "gpt-small")
    assert run.skipped == []


def test_a_run_of_another_version_is_not_read_and_named(tmp_path):
    for name, version in (("old", 3), ("new", 6), ("odd", [5])):
        write_run(tmp_path / name, {"schema_version": version}, {"schema_version": version})
    copy_golden(tmp_path / "good")
    runs = effllm.load(tmp_path)

    assert names(runs) == ["good"]
    assert [(one.path.parent.name, one.path.name) for one in runs.skipped] == [
        (name, file) for name in ("new", "odd", "old") for file in ("run.json", "summary.json")
    ]
    assert runs.skipped[-1].reason == (
        "it has schema_version 3, and this version of effllm reads only 5: use the version of effllm that wrote it"
    )


def test_a_folder_a_glob_a_file_and_a_list_are_read(tmp_path):
    for name in ("a/one", "a/two", "b/three"):
        write_run(tmp_path / name, {"run_id": Path(name).name}, {"status": "completed"})
    (tmp_path / "empty").mkdir()

    read = {
        "one two three": tmp_path,
        "two three": f"{tmp_path}/*/t*",
        "three one two": [tmp_path / "b", tmp_path / "a/one", tmp_path / "a"],
        "two": tmp_path / "a/two/summary.json",
    }
    assert [column(effllm.load(path).runs, "run_id") for path in read.values()] == [ids.split() for ids in read]
    assert [len(one) for one in (effllm.load(tmp_path), effllm.load(tmp_path / "a/one"))] == [3, 1]
    assert [run.identity.run_id for run in effllm.load(tmp_path)] == ["one", "two", "three"]
    assert repr(effllm.load(tmp_path / "a/one")) == "<Run of 1 run folder>"
    assert type(effllm.load(tmp_path / "b")).__name__ == "Runs"


@cases(
    ("tags", "found"),
    [
        ({"team": "vision"}, ["one"]),
        (["debug"], ["one"]),
        (["team=vision", "debug"], ["one"]),
        ({"team": "audio"}, []),
        ({}, ["one", "three", "two"]),
    ],
)
def test_runs_are_selected_by_tags(tmp_path_factory, tags, found):
    folder = tmp_path_factory.mktemp("runs")
    for name, own in (("one", ["team=vision", "debug"]), ("two", ["team=text"]), ("three", [])):
        write_run(folder / name, {"tags": own}, {"tags": own})

    assert names(effllm.load(folder, tags=tags)) == found


@pytest.mark.parametrize("path", ["missing", "empty", "missing*", [], "", ["run", ""]])
def test_paths_without_a_run_raise_one_line(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    copy_golden(tmp_path / "run")

    with pytest.raises(UnreadableRun, match=r"missing|empty|no path") as error:
        effllm.load(path)
    assert "\n" not in str(error.value)


def test_unreadable_documents_are_named_and_other_runs_are_read(tmp_path):
    write_run(tmp_path / "good", {}, {"status": "completed"})
    write_run(tmp_path / "torn", {"run_id": "torn"}, b'{"status": "comp')
    write_run(tmp_path / "nothing", b"\x80\xff", b"[]")
    write_run(tmp_path / "early", {"started_time_s": 1.5e9})
    runs = effllm.load(tmp_path)

    assert sorted(values(runs.runs, "run_id, status, started_utc::VARCHAR")) == [
        ("early", None, "2017-07-14 02:40:00"), ("good", "completed", None), ("torn", None, None),
    ]  # fmt: skip
    found = {f"{one.path.parent.name}/{one.path.name}" for one in runs.skipped}
    assert found == {"torn/summary.json", "nothing/run.json", "nothing/summary.json"}
    assert all("\n" not in one.reason for one in runs.skipped)


def test_path_that_is_not_utf8_is_named_and_other_runs_are_read(tmp_path):
    for name in (b"a\xff".decode(errors="surrogateescape"), "b"):
        write_run(tmp_path / name, {"run_id": "x"}, {"status": "completed"})

    runs = effllm.load(tmp_path)
    assert (names(runs), [one.reason for one in runs.skipped]) == (["b"], ["its path is not UTF-8"])


def test_run_that_cannot_be_read_has_no_folder(tmp_path):
    write_run(tmp_path / "run", b"{", b"")

    run = effllm.load(tmp_path / "run")
    with pytest.raises(UnreadableRun, match=r"run.json: not a JSON object"):
        _ = run.folder


@pytest.mark.parametrize("table", ["runs", "windows"])
def test_full_temporary_folder_is_named(monkeypatch, table):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    loaded = effllm.load(GOLDEN)
    monkeypatch.setattr(database.tempfile, "NamedTemporaryFile", full)

    with pytest.raises(OSError, match=r"No space left on device \(TMPDIR sets another folder\): .*effllm-"):
        loaded.windows if table == "windows" else effllm.load(GOLDEN)


def test_two_runs_of_one_name_are_two_rows(tmp_path):
    for parent in ("a", "b"):
        copy_golden(tmp_path / parent / "run")
    runs = effllm.load(tmp_path)

    assert (column(runs.runs, "run_id"), len(set(runs.folders))) == (["run", "run"], 2)
    assert len(effllm.load([tmp_path / "a", tmp_path / "a/run"])) == 1


def test_values_of_a_wrong_type_are_null(tmp_path):
    odd = {"metrics": [], "energy": 3, "goodput": {"seconds": {"kept": "x"}}, "tokens": 2**70, "loss": "nan"}
    odd |= {"tags": "word", "waterfall": {"parts": 7}, "events": {"joined": -1}, "status": ["a"]}
    write_run(tmp_path / "run", {"ranks": {"0": 7, "1": {"host": 3, "devices": 1}}}, odd)

    [row] = values(effllm.load(tmp_path / "run").runs, "tokens, loss, goodput_seconds, hosts, tags")
    assert row == (None, None, {"kept": None}, None, {})


def test_lines_are_rows():
    run = effllm.load(GOLDEN)

    assert values(run.windows, "run_id, window_number, iteration, tokens, loss IS NULL, final") == [
        ("run_folder_5", 1, 20, 280_000, False, False),
        ("run_folder_5", 2, 40, 280_000, False, False),
        ("run_folder_5", 3, 60, 280_000, False, False),
        ("run_folder_5", 4, 60, 0, True, True),
    ]
    window = next(iter(read_windows(GOLDEN)))
    energy, metrics = window.last.energy, [window.values[tag] for tag in ("amu_gb", "run_energy/joules_per_token")]
    first = "energy_j, energy_error_j, amu_gb, run_energy_joules_per_token, ranks_expected"
    assert values(run.windows.limit(1), first) == [pytest.approx((energy.joules, energy.error_j, *metrics, 2))]
    assert run.sql("SELECT count(*), sum(tokens), sum(energy_j) FROM ranks").fetchall() == [
        (8, 840_000, pytest.approx(run.summary.energy.measured_joules))
    ]
    assert column(run.events, "kind") == [event.kind for event in read_events(GOLDEN)]
    assert run.skipped == []


def test_columns_have_the_values_of_the_store(tmp_path):
    store = RunFolder(tmp_path / "run", {"run_id": "run"})
    for number in range(1, 4):
        report = make_report(10 * number, loss=math.nan if number == 2 else 2.5, run=complete_totals(10 * number))
        store.write(report, [make_row(rank=rank, iteration=10 * number) for rank in range(2)])
    store.close()
    run = effllm.load(tmp_path / "run")

    assert values(run.windows, "iteration, loss, amu_gb") == [
        (row.iteration, row.loss, row.values["amu_gb"]) for row in read_windows(run.folder)
    ]
    assert column(run.windows, "loss") == [2.5, None, 2.5]
    fields = [name for name in RankRow.__struct_fields__ if name in run.ranks.columns]
    assert set(RankRow.__struct_fields__) - set(fields) == {"profile", "window"}
    missing = {key: {} for key in ("phases_s", "phases_j", "other_devices_j", "throttled_s", "gauges")}
    defaults = {"losses_not_finite": 0, **dict.fromkeys(FIELDS, 0), **missing}
    for row, found in zip(read_ranks(run.folder), values(run.ranks, ", ".join(fields)), strict=True):
        known = {name: getattr(row, name, defaults.get(name)) for name in fields} | msgspec.to_builtins(row)
        assert dict(zip(fields, found, strict=True)) == {name: known[name] for name in fields}


def test_every_metric_of_a_window_and_a_summary_has_a_column():
    run = effllm.load(GOLDEN)
    totals = complete_totals()

    assert {tag.replace("/", "_") for tag in metrics.window_values(totals, totals, totals)} <= set(run.windows.columns)
    assert {tag.replace("/", "_") for tag in metrics.summary_values(totals, totals)} <= set(run.runs.columns)


def test_torn_and_invalid_lines_are_named_and_other_lines_are_read(tmp_path):
    folder = copy_golden(tmp_path / "run")
    with (folder / "windows-0001.jsonl").open("ab") as file:
        file.write(b'null\n[]\n\n"a"\n{"attempt": 1}\n\x80\xff\n{"attempt":1,"wind')
    run = effllm.load(folder)

    assert len(run.windows) == 4
    assert skipped(run) == [("windows-0001.jsonl", "6 incomplete or invalid lines")]
    assert run.skipped[0].path.parent == run.folder


def write_corpus(folder, kind, name):
    """Write a run folder with each file of a kind; return how many."""
    for path in CORPUS.glob(f"{kind}-*"):
        (folder / path.name).mkdir()
        (folder / path.name / name).write_bytes(path.read_bytes()[1:])  # the first byte selects a file
    return len(list(folder.iterdir()))


@pytest.mark.parametrize("kind", ["windows", "ranks", "events"])
def test_lines_of_any_bytes_do_not_end_the_reading(tmp_path, kind):
    number = write_corpus(tmp_path, kind, "events.jsonl" if kind == "events" else f"{kind}-0001.jsonl")
    good = copy_golden(tmp_path / "good")
    runs = effllm.load(tmp_path)

    assert len(runs) == number + 1 > 1
    relation = getattr(runs, kind)
    assert len(relation.filter("run_id = 'good'")) == len(getattr(effllm.load(good), kind))
    for name, type_ in zip(relation.columns, relation.types, strict=True):
        assert type_ != "DOUBLE" or not relation.filter(f'isnan("{name}") OR isinf("{name}")').fetchall()


@pytest.mark.parametrize("document", ["run", "summary"])
def test_documents_of_any_bytes_do_not_end_the_reading(tmp_path, document):
    number = write_corpus(tmp_path, document, f"{document}.json")
    runs = effllm.load(tmp_path)

    assert len(runs) + len({one.path for one in runs.skipped}) == number
    assert f"{document}-good" in names(runs)


def test_a_run_without_any_measurement_has_empty_tables(tmp_path):
    run = effllm.load(write_run(tmp_path / "run", {"run_id": "run"}))

    assert [len(table) for table in (run.runs, run.windows, run.ranks, run.events)] == [1, 0, 0, 0]
    assert (run.summary, run.skipped) == (None, [])


def test_names_with_glob_characters_are_read_as_they_are(tmp_path):
    for name in ("run[1]", "run*", "run1", "run?", "project=x", "run'; --"):
        copy_golden(tmp_path / name)

    assert len(effllm.load(tmp_path).windows) == 6 * 4
    assert len(effllm.load(tmp_path / "run[1]").windows) == 4
    assert len(effllm.load([tmp_path / "run*"]).windows) == 4


def test_files_that_are_not_regular_are_named_and_never_opened(tmp_path):
    folder = write_run(tmp_path / "run", {"run_id": "run"})
    for name in ("summary.json", "windows-0001.jsonl"):
        os.mkfifo(folder / name)
    run = effllm.load(folder)

    assert len(run.windows) == 0
    assert skipped(run) == [
        ("summary.json", "not a regular file"), ("windows-0001.jsonl", "not a readable file")
    ]  # fmt: skip


ONE_INVALID = ("windows-0002.jsonl", "1 incomplete or invalid line")


def test_line_above_the_limit_of_duckdb_is_named_and_other_lines_are_read(tmp_path):
    run = copy_golden(tmp_path / "run")
    long = '{"attempt":2,"loss":' + "1" * 2**24 + "}"
    (run / "windows-0002.jsonl").write_text(long + '\n{"attempt":2,"window":1,"time_s":5}')
    found = effllm.load(run)

    assert (len(found.windows), skipped(found)) == (5, [ONE_INVALID])


@pytest.mark.parametrize("together", [1, 10**9])
def test_lines_have_the_order_of_the_files_of_any_size(tmp_path, monkeypatch, together):
    monkeypatch.setattr(database, "MAX_COPY_BYTES", together)
    for name in ("a", "b", "c"):
        copy_golden(tmp_path / name)
        (tmp_path / name / "windows-0002.jsonl").write_text('{"attempt":2,"window":1,"time_s":5.0}\n{"torn')
    runs = effllm.load(tmp_path)

    assert values(runs.windows, "run_id, attempt, window_number") == [
        (name, *number) for name in "abc" for number in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1))
    ]
    assert skipped(runs) == [ONE_INVALID] * 3


@pytest.fixture
def cached(monkeypatch):
    """Use the cache for any number of runs."""
    monkeypatch.setattr(database, "MIN_RUNS", 1)
    monkeypatch.setattr(database, "MAX_NEW_ROWS", 0)


def no_reading(path):
    raise AssertionError(f"{path} was read")


def table_of(path):
    return effllm.load(path).runs.fetchall()


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("damaged", [None, b"", b"PAR1", b"\x80\x04]."])
def test_rows_of_unchanged_runs_are_read_from_a_private_cache(tmp_path, monkeypatch, damaged):
    for name in ("a", "b"):
        copy_golden(tmp_path / "runs" / name)
    first = table_of(tmp_path / "runs")
    [file] = (cache_folder() / "runs").iterdir()
    if damaged is not None:
        file.write_bytes(damaged)
        assert table_of(tmp_path / "runs") == first
    monkeypatch.setattr(database, "read_document", no_reading)

    assert table_of(tmp_path / "runs") == first
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.usefixtures("cached")
def test_changed_and_new_runs_are_read_again(tmp_path):
    for name in ("a", "b"):
        copy_golden(tmp_path / name)
    effllm.load(tmp_path)
    text = (tmp_path / "b/summary.json").read_bytes()
    own_files.replace_file(tmp_path / "b/summary.json", text.replace(b'"completed"', b'"kompleted"'))  # the same size
    copy_golden(tmp_path / "aa")
    shutil.rmtree(tmp_path / "a")

    assert values(effllm.load(tmp_path).runs, "run_id, status") == [("aa", "completed"), ("b", "kompleted")]


@pytest.mark.usefixtures("cached")
def test_unreadable_files_are_reported_each_time(tmp_path):
    write_run(tmp_path / "run", {"run_id": "run"}, b"{")

    assert [len(effllm.load(tmp_path).skipped) for _ in range(2)] == [1, 1]


@pytest.mark.usefixtures("cached")
def test_cache_that_cannot_be_written_is_not_used(tmp_path, monkeypatch):
    copy_golden(tmp_path / "runs/a")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    assert len(table_of(tmp_path / "runs")) == 1


def test_a_run_that_continues_is_read_again_by_a_new_load(tmp_path):
    line = '{"attempt":1,"window":%d,"time_s":5.0,"values":{"amu_gb":1.5}}\n'
    summary = {"status": "running", "is_over": False}
    folder = write_run(tmp_path / "run", {"run_id": "run"}, summary, windows=line % 1 + (line % 2)[:20])
    before = effllm.load(folder)

    assert values(before.windows, "window_number, amu_gb, pcu_ratio") == [(1, 1.5, None)]
    assert values(before.runs, "status, is_over, ended_time_s") == [("running", False, None)]
    (folder / "windows-0001.jsonl").write_text(line % 1 + line % 2)
    assert [len(run.windows) for run in (before, effllm.load(folder))] == [1, 2]


def test_losses_that_were_nan_are_counted_and_no_value_is_nan():
    """The loss of iteration 7 was NaN on both ranks."""
    run = effllm.load(GOLDEN)

    assert values(run.runs, "losses_not_finite, first_not_finite, loss") == [(2, 7, 2.0)]
    assert column(run.windows, "losses_not_finite")[0] == 2
    rows = [row for table in (run.runs, run.windows, run.ranks) for row in table.fetchall()]
    assert all(math.isfinite(value) for row in rows for value in row if isinstance(value, float))
