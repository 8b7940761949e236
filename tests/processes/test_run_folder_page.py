"""docs/run-folder.md: its tables are the columns of the tables, and its examples run on a real run folder."""

import re
import shlex
import subprocess
import sys

import run_folder_page
from run_folder_page import COLUMNS, GOLDEN, PAGE

import effllm


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_tables_of_the_page_are_the_columns_of_the_relations():
    assert PAGE.read_text() == run_folder_page.page(), "run: python tests/run_folder_page.py"
    run = effllm.load(GOLDEN)
    for table in COLUMNS:
        section = PAGE.read_text().partition(f"### {table}\n")[2].partition("\n### ")[0]
        columns = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        columns += re.findall(r"`(\w+)`", section.partition("\nColumns of metrics: ")[2])
        assert sorted(columns) == sorted(getattr(run, table).columns)


def test_examples_of_the_page_run_on_a_real_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    demo = [sys.executable, "-m", "effllm", "demo", "--ranks", "2", "--iterations", "40"]
    subprocess.run([*demo, "--run-dir", "efficientllm_runs"], check=True, stdout=subprocess.DEVNULL)
    names = {}
    for code in blocks("python"):
        exec(code, names)

    out = capsys.readouterr().out
    assert out.count("completed") == 2
    assert "rank 1 joined" in out
    assert [status for (status,) in names["runs"].runs.select("status").fetchall()] == ["completed"]
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) == 7
    for line in commands:
        name, *arguments = shlex.split(line)
        assert name == "effllm"
        done = subprocess.run([sys.executable, "-m", "effllm", *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
