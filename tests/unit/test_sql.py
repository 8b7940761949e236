"""`effllm runs --sql`: queries that can only read the tables of runs."""

import csv
import io
import json

import msgspec
import pytest
from cases import cases
from run_folders import GOLDEN, change_document, copy_golden

from effllm.commands.run_query import print_query


@pytest.fixture
def ask(capsys):
    """Return a function that runs a query and returns the exit status, stdout and stderr."""

    def ask(query, form="text", runs=GOLDEN):
        status = print_query([str(runs)], query, form)
        return status, *capsys.readouterr()

    return ask


def test_result_is_an_aligned_table(ask):
    status, out, err = ask("SELECT run_id, status, iterations, loss, account FROM runs")

    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "run_id        status     iterations  loss  account",
        "------------  ---------  ----------  ----  -------",
        "run_folder_5  completed          60  2.00  nlp",
        "(1 row)",
    ]


def test_wide_result_has_lines_of_at_most_eighty_letters(ask):
    status, out, _ = ask("SELECT * FROM runs")

    assert (status, max(map(len, out.splitlines())) <= 80, "energy_total_joules" in out) == (0, True, True)


def test_result_as_csv_and_json(ask):
    query = "SELECT window_number, tokens, loss, time_by_class FROM windows ORDER BY 1"
    _, as_csv, _ = ask(query, "csv")
    _, as_json, _ = ask(query, "json")

    rows, objects = list(csv.DictReader(io.StringIO(as_csv))), json.loads(as_json)
    assert [one["tokens"] for one in objects] == [int(row["tokens"]) for row in rows] == [280_000] * 3 + [0]
    assert (rows[3]["loss"], objects[3]["loss"]) == ("", None)
    assert objects[0]["time_by_class"] == json.loads(rows[0]["time_by_class"])
    assert objects[0]["time_by_class"]["startup"] > 0
    assert ask("SELECT 1 WHERE false", "json")[1] == "[]\n"


def test_csv_has_no_formula_and_json_has_no_nan(ask):
    query = "SELECT '=1+2' AS a, -3 AS b, [1, 'inf'::DOUBLE] AS c, {'d': 'nan'::DOUBLE} AS d"

    assert ask(query, "csv")[1].splitlines()[1] == """'=1+2,-3,"[1.0, null]","{""d"": null}\""""
    assert ask(query, "json")[1] == '[{"a": "=1+2", "b": -3, "c": [1.0, null], "d": {"d": null}}]\n'


FORBIDDEN = """
COPY runs TO '{path}'
EXPLAIN ANALYZE COPY runs TO '{path}'
EXPORT DATABASE '{path}'
ATTACH '{path}'
CREATE TABLE x AS SELECT 1
DELETE FROM runs
SET enable_external_access = true
INSTALL httpfs
LOAD httpfs
PRAGMA database_list; SELECT 1
SELECT 1; COPY runs TO '{path}'
SELECT * FROM read_csv('/etc/passwd')
SELECT * FROM read_text('/etc/passwd')
SELECT content FROM read_blob('/proc/self/environ')
SELECT * FROM glob('/etc/*')
FROM '/etc/passwd'
FROM 'data.parquet'
SELECT * FROM read_parquet('https://example.com/x.parquet')
SELECT getenv('HOME')
SELECT * FROM sqlite_scan('{path}', 'x')
SELECT * FROM python_object
"""


@cases("query", FORBIDDEN.strip().splitlines())
def test_query_cannot_change_or_read_anything_else(ask, tmp_path, query):
    python_object = {"a": [1]}  # noqa: F841 - DuckDB would find this name
    path = tmp_path / "out"
    status, out, err = ask(query.format(path=path))

    assert (status, out) == (1, "")
    assert err.startswith("effllm runs: ")
    assert err.count("\n") == 1
    assert "root:" not in err
    assert not path.exists()


def test_unknown_table_is_reported_with_the_names_of_the_tables(ask):
    _, _, err = ask("SELECT * FROM nothere")

    assert "nothere does not exist" in err
    assert "Did you mean" not in err, "DuckDB would name a table of its own"
    assert "(tables: runs, windows, ranks, events)" in err


def test_missing_folder_is_one_line(ask, tmp_path):
    assert ask("SELECT 1", runs=tmp_path / "none") == (1, "", f"effllm runs: {tmp_path / 'none'} does not exist\n")


def test_terminal_escapes_in_files_are_never_printed(ask, tmp_path):
    folder = copy_golden(tmp_path / "run")
    hostile = "x\x1b[2J\x1b]0;title\x07\ny"
    change_document(folder / "summary.json", user=hostile, status=[hostile], events={hostile: 1})
    event = msgspec.json.encode({"time_s": 1.0, "kind": hostile, "text": hostile})
    (folder / "events.jsonl").write_bytes(event + b'\n{"')

    for form in ("text", "csv", "json"):
        for query in ("SELECT user, events FROM runs", f'SELECT *, 1 AS "{hostile}" FROM events', f"SELEC '{hostile}'"):
            _, out, err = ask(query, form, tmp_path)
            assert all(letter.isprintable() or letter == "\n" for letter in out + err)
    assert "skipped" in ask("SELECT * FROM events", "text", tmp_path)[2]


def test_error_of_the_database_is_one_line(ask, monkeypatch):
    monkeypatch.setattr("effllm.analysis.database.SETTINGS", {"memory_limit": "1MB"})
    status, out, err = ask("SELECT 1")

    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "memory" in err.lower()


def test_large_sorts_still_use_the_disk(ask, monkeypatch):
    monkeypatch.setattr("effllm.analysis.database.SETTINGS", {"memory_limit": "150MB", "threads": "1"})

    status, out, err = ask(
        "SELECT count(*) FROM (SELECT hash(i) h, repeat('x', 200) FROM range(1000000) t(i) ORDER BY h) s"
    )
    assert (status, err) == (0, "")
    assert "1000000" in out
