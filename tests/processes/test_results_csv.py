"""Several processes append rows to one CSV file."""

from __future__ import annotations

import csv
import subprocess
import sys

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
