"""effllm/runs/provenance.py: what run.json says about where its numbers come from."""

import json
import subprocess

import pytest

from effllm.runs.provenance import gather

QUIET = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    (tmp_path / "train.py").write_text("1\n")
    for command in (["init", "-q"], ["add", "."], [*QUIET, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_the_commit_is_named_and_whether_the_code_differs_from_it(repository):
    clean = gather(repository)
    (repository / "notes.txt").write_text("not part of it")
    untracked = gather(repository)
    (repository / "train.py").write_text("2\n")
    dirty = gather(repository)

    assert len(clean["git_commit"]) == 40
    assert [facts["git_dirty"] for facts in (clean, untracked, dirty)] == [False, False, True]


def test_outside_a_repository_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    facts = gather(tmp_path)

    assert "git_commit" not in facts
    assert facts["packages"]["msgspec"]
    assert json.loads(json.dumps(facts)) == facts


def test_without_git_there_is_no_commit(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")

    assert "git_commit" not in gather(repository)
