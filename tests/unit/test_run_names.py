"""How commands name a run: a path, its name, the beginning of it, or ``last``."""

import os
from pathlib import Path

import pytest
from run_folders import write_run
from typer.testing import CliRunner

from effllm.analysis.run_folders import UnreadableRun, find_runs, named_run
from effllm.commands import top
from effllm.commands.app import app

NAMES = ("20260101-120000-1a2b3c4d", "20260101-130000-1a2b3c4d", "20260102-120000-1a2b3c4d")
FOUND = {NAMES[0]: NAMES[0], "20260102": NAMES[2], "20260101-13": NAMES[1], "last": NAMES[1]}


@pytest.mark.parametrize("name", FOUND)
def test_a_run_is_found_by_its_name(runs, name):
    assert named_run(name) == runs / FOUND[name]
    assert [run.folder for run in find_runs(name)] == [runs / FOUND[name]]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Three runs, the second of which started last."""
    folder = tmp_path / "runs"
    for name, time_s in zip(NAMES, (100, 300, 200), strict=True):
        write_run(folder / name, {"al_seconds": 1.0})
        os.utime(folder / name / "run.json", (time_s, time_s))
    monkeypatch.setenv("EFFICIENTLLM_RUN_DIR", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_path_is_before_a_name(runs):
    Path("last").mkdir()

    assert named_run("last") == Path("last")
    assert named_run("other/last") == Path("other/last")


def test_a_name_of_several_runs_lists_them(runs):
    with pytest.raises(UnreadableRun, match=f"20260101 is the name of 2 runs in {runs}: {NAMES[1]}, {NAMES[0]}$"):
        named_run("20260101")


def test_a_wrong_name_has_the_nearest_ones(runs):
    with pytest.raises(UnreadableRun, match=f"no run in {runs} has this name; near: {NAMES[2]}"):
        named_run("20260102-120000-1a2b3c4e")


def test_each_command_finds_the_last_run(runs, tmp_path, capsys):
    page = str(tmp_path / "a.html")
    for arguments in (["runs", "last"], ["report", "last", "-o", page], ["compare", "last", "--paper"]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    inspected = CliRunner().invoke(app, ["inspect", "last"])
    assert inspected.stderr.startswith(f"effllm inspect: {runs / NAMES[1]}/summary.json cannot be read")
    assert top.main(["nothing", "--once"]) == 1
    assert "effllm top: nothing does not exist, and no run in " in capsys.readouterr().err
