"""effllm/runs/provenance.py: what run.json says about where its numbers come from, and what it must not say."""

import json
import subprocess

import pytest

from effllm.runs.provenance import gather, without_secrets

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


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["train.py", "--api-key", "abc", "--lr", "1"], ["train.py", "--api-key", "***", "--lr", "1"]),
        (["train.py", "--hf_token=a=b"], ["train.py", "--hf_token=***"]),
        (["WANDB_API_KEY=abc", "--x"], ["WANDB_API_KEY=***", "--x"]),
        (["--PASSWORD", "a", "b"], ["--PASSWORD", "***", "b"]),
        (["--use-secret", "--lr", "1"], ["--use-secret", "--lr", "1"]),
        (["--aws-credentials", "x"], ["--aws-credentials", "***"]),
        ([], []),
    ],
)
def test_what_is_named_like_a_secret_is_left_out_of_the_command(command, shown):
    assert without_secrets(command) == shown


@pytest.mark.parametrize("word", ["--tokenizer-type", "--tokenizer_name_or_path", "--max-tokens", "--train-tokens"])
def test_tokens_of_text_are_no_secret(word):
    assert without_secrets([word, "5"]) == [word, "5"]
    assert without_secrets([f"{word}=5"]) == [f"{word}=5"]
