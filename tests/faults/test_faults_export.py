"""Export to a full disk: one line, exit status 1, and only complete files."""

import subprocess
import sys

import duckdb
import pytest
from run_folders import GOLDEN, copy_golden

pytest_plugins = ["disks"]
pytestmark = pytest.mark.faults


def export(runs, path):
    return subprocess.run(
        [sys.executable, "-m", "effllm", "runs", str(runs), "--export", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("form", ["out", "out.csv", "out.jsonl"])
def test_export_to_a_full_disk_leaves_the_old_files(disk, form, tmp_path):
    path, later = disk.path / form, copy_golden(tmp_path / "later")
    assert export(GOLDEN, path).returncode == 0
    before = {one: one.read_bytes() for one in disk.path.rglob("*") if one.is_file()}
    disk.fill()

    done = export(later, path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("effllm runs: ")
    assert done.stderr.count("\n") == 1
    left = {one: one.read_bytes() for one in disk.path.rglob("*") if one.is_file() and one in before}
    assert left == before
    assert [one for one in disk.path.rglob(".*") if one.name.endswith(".new")] == []
    disk.empty()
    assert export(later, path).returncode == 0
    if form == "out":
        assert duckdb.sql(f"SELECT count(*) FROM '{path}/v5/runs/*/*/*.parquet'").fetchall() == [(2,)]
