"""Processes of their own that read run folders, and that append rows to one CSV file."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

from run_folders import GOLDEN, copy_golden


def test_package_loads_without_duckdb_and_names_the_missing_extra():
    code = (
        "import sys; sys.modules['duckdb'] = None; import effllm; from effllm import *\n"
        f"try: effllm.load({str(GOLDEN)!r})\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "effllm.load needs DuckDB: pip install 'effllm[analysis]'\n"


def test_parallel_exports_lose_no_row_of_a_csv_file(tmp_path):
    """Each of three runs is exported by two processes at the same time: its row is written once."""
    path = tmp_path / "all.csv"
    for name in "abc":
        copy_golden(tmp_path / name)
    commands = [
        [sys.executable, "-m", "effllm", "runs", str(tmp_path / one), "--export", str(path)] for one in "aabbcc"
    ]
    writers = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]

    assert [writer.wait(120) for writer in writers] == [0] * 6
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(Path(row["folder"]).name for row in rows) == ["a", "b", "c"]


def test_ledger_loads_no_pandas():
    """DuckDB imports pandas for the first parameter of a query: half of the time of a ledger of 10,000 runs."""
    code = (
        "import sys, pathlib; from effllm.analysis.ledger import read_ledger, totals\n"
        f"runs, _ = read_ledger([pathlib.Path({str(GOLDEN)!r})])\n"
        "assert totals(runs, 'node').total.runs == 1; print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"


PROCESSES, FILES, ROWS = 4, 30, 3
WRITER = f"""
import os, sys
from effllm.instruments.results_csv import append_row
print("ready", flush=True)
while not os.path.exists("begin"):
    pass
for number in range({FILES}):  # the header of each file is written once, too
    for row in range({ROWS}):
        append_row(f"results-{{number}}.csv", {{"model": sys.argv[1], "seed": row, "notes": "x" * 5000}})
"""


def test_no_row_is_lost_if_processes_write_at_the_same_time(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(number)], cwd=tmp_path, stdout=subprocess.PIPE)
        for number in range(PROCESSES)
    ]
    assert [writer.stdout.readline() for writer in writers] == [b"ready\n"] * PROCESSES
    (tmp_path / "begin").touch()

    assert [writer.wait(60) for writer in writers] == [0] * PROCESSES
    expected = sorted((str(number), str(row)) for number in range(PROCESSES) for row in range(ROWS))
    for number in range(FILES):
        with (tmp_path / f"results-{number}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert sorted((row["model"], row["seed"]) for row in rows) == expected
        assert {row["notes"] for row in rows} == {"x" * 5000}
    for writer in writers:
        writer.stdout.close()
