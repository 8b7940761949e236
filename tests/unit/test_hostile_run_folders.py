"""Every command that reads run folders, on folders with pipes, devices, long lines and impossible numbers."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from cases import cases
from run_folders import GOLDEN, copy_golden
from run_lines import read_windows
from typer.testing import CliRunner

from effllm.commands.app import app
from effllm.store import regular_file

pytest.importorskip("duckdb", reason="duckdb is not installed")

FILES = ("run.json", "summary.json", "windows-0001.jsonl", "ranks-0001.jsonl", "events.jsonl")
OTHERS = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}
NUMBERS = {"zero": 0, "negative": -1, "largest": 1.7e308}


@pytest.fixture
def folder(tmp_path):
    return copy_golden(tmp_path / "run")


def commands(run, other):
    """Return the arguments of each command."""
    out = run.parent / "out"
    views = [["inspect", run], ["inspect", run, "--json"], ["top", run, "--once"], ["report", run, "-o", f"{out}.html"]]
    sides = [["compare", run, other], ["compare", other, run], ["compare", run, "--paper"]]
    runs = [[], ["--by", "outcome"], ["--export", f"{out}.jsonl"]]
    runs += [["--sql", f"SELECT * FROM {table}"] for table in ("runs", "windows", "ranks", "events")]
    return [*views, *sides, *(["runs", run, *options] for options in runs)]


def invoked(arguments):
    """Run a command; fail if it raises an exception, or has another exit status than those of commands."""
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, done.exception)
    assert done.exit_code in (0, 1, 2, 3), arguments
    return done


@cases("name", NUMBERS)
def test_each_command_names_a_file_with_impossible_numbers(name, tmp_path):
    run = shutil.copytree(GOLDEN, tmp_path / name)
    for file in FILES:
        with_numbers(run / file, NUMBERS[name])

    for arguments in commands(run, GOLDEN):
        done = invoked(arguments)
        if name != "zero":  # a possible number
            assert done.exit_code == {"inspect": 1, "top": 3, "compare": 2}.get(arguments[0], 0), arguments
            assert re.search(r"(run|summary)\.json( cannot be read|: | is not)", done.output), arguments


@cases(("kind", "name"), [("pipe", name) for name in FILES] + [("device", FILES[1]), ("folder", FILES[2])])
def test_commands_refuse_a_file_that_is_no_regular_file(kind, name, tmp_path):
    run = shutil.copytree(GOLDEN, tmp_path / f"{kind}-{name}")
    (run / name).unlink()
    OTHERS[kind](run / name)

    for arguments in commands(run, GOLDEN)[:5]:
        invoked(arguments)


def with_numbers(path, number):
    """Replace every number in a file, except the version."""

    def replaced(value):
        if isinstance(value, dict):
            return {name: one if name == "schema_version" else replaced(one) for name, one in value.items()}
        if isinstance(value, list):
            return list(map(replaced, value))
        return number if isinstance(value, int | float) and not isinstance(value, bool) else value

    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    path.write_text("".join(f"{json.dumps(replaced(json.loads(text)))}\n" for text in texts))


def test_lines_without_an_end_are_skipped_and_never_read_as_a_whole(folder, monkeypatch):
    monkeypatch.setattr(regular_file, "MAX_LINE_BYTES", 100_000)
    good = (folder / "windows-0001.jsonl").read_bytes()
    (folder / "windows-0001.jsonl").write_bytes(b"{" * 250_000 + b"\n" + good + b"\0" * 250_000)

    windows = read_windows(folder)
    assert len(list(windows)) == good.count(b"\n")
    assert windows.num_skipped == 2
