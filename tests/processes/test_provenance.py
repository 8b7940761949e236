"""effllm/store/provenance.py: facts in run.json about the code and the packages of a run."""

import json
import os
import shutil
import subprocess

import pytest
from jobs import SCRIPTS, until

from effllm.config.settings import Config
from effllm.records.orders import Orders
from effllm.server.run_facts import RunFacts
from effllm.store.provenance import Git, host_facts

QUIET = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]


def git(folder, *arguments):
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    (tmp_path / "train.py").write_text("1\n")
    for command in (["init", "-q"], ["add", "."], [*QUIET, "commit", "-qm", "first"]):
        git(tmp_path, *command)
    return tmp_path


def dirty(folder):
    return Git(folder).facts()["git_dirty"]


def test_commit_and_dirty_state_of_the_code_are_recorded(repository, monkeypatch):
    assert len(Git(repository).facts()["git_commit"]) == 40
    os.utime(repository / "train.py", (1, 1))  # if git used locks, it would write this time to its index
    (repository / "notes.txt").write_text("untracked")
    before = (repository / ".git" / "index").read_bytes()
    assert dirty(repository) is False
    assert (repository / ".git" / "index").read_bytes() == before
    (repository / "train.py").write_text("2\n")
    assert dirty(repository) is True
    git(repository, "add", "train.py")
    assert dirty(repository) is True

    monkeypatch.setenv("PATH", "")
    assert Git(repository).facts() == {}


def test_commit_is_of_the_script_and_not_of_the_current_folder(repository, tmp_path_factory):
    current = tmp_path_factory.mktemp("current")
    for command in (["init", "-q"], [*QUIET, "commit", "-qm", "other", "--allow-empty"]):
        git(current, *command)
    (current / "link.py").symlink_to(repository / "train.py")
    program = current / "site-packages" / "tool.py"
    program.parent.mkdir()
    program.touch()
    of_script, of_folder = (git(one, "rev-parse", "HEAD").strip() for one in (repository, current))

    for script in (str(repository / "train.py"), os.path.relpath(repository / "train.py", current), "link.py"):
        assert Git(current, script).facts()["git_commit"] == of_script
    for script in ("", "-c", "missing.py", "site-packages/tool.py", "a\0b"):
        assert Git(current, script).facts()["git_commit"] == of_folder


def test_script_outside_a_repository_has_no_commit_in_a_repository(repository, tmp_path_factory, monkeypatch):
    script = tmp_path_factory.mktemp("scripts") / "train.py"
    script.touch()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(script.parent.parent))

    assert Git(repository, str(script)).facts() == Git(script.parent).facts() == {}


@pytest.mark.parametrize("setting", ["core.fsmonitor", "filter.slow.clean", "filter.slow.process"])
def test_programs_that_the_repository_configures_are_not_run(repository, tmp_path, setting):
    git(repository, "config", setting, f"touch {tmp_path}/ran; false")
    (repository / ".git" / "info" / "attributes").write_text("* filter=slow\n")
    os.utime(repository / "train.py", (1, 1))

    dirty(repository)

    assert not (tmp_path / "ran").exists()


def test_dirty_state_is_unknown_for_a_changed_file_with_a_filter(repository):
    git(repository, "config", "filter.large.clean", "cat")
    git(repository, "config", "filter.large.required", "true")
    (repository / ".git" / "info" / "attributes").write_text("*.bin filter=large\n")
    (repository / "model.bin").write_text("a\n")
    git(repository, "add", ".")
    git(repository, *QUIET, "commit", "-qm", "second")
    states = [dirty(repository)]
    (repository / "model.bin").write_text("b\n")
    states.append(dirty(repository))
    (repository / "train.py").write_text("2\n")

    assert [*states, dirty(repository)] == [False, "unknown", True]


def test_submodules_are_ignored(repository, tmp_path_factory):
    sub = tmp_path_factory.mktemp("sub")
    for command in (["init", "-q"], [*QUIET, "commit", "-qm", "x", "--allow-empty"]):
        git(sub, *command)
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(sub), "sub")
    git(repository, *QUIET, "commit", "-qm", "second")
    git(repository / "sub", "config", "core.fsmonitor", f"touch {sub}/ran; false")
    (repository / "sub" / "new.py").write_text("x")

    assert dirty(repository) is False
    assert not (sub / "ran").exists()


@pytest.fixture
def slow_git(tmp_path, monkeypatch):
    """Put a fake git on the path; it hangs in ``git status``, and writes a file when SIGTERM ends it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = f"""#!/bin/sh
case "$*" in *status*) ;; *) exec {shutil.which("git")} "$@";; esac
trap 'echo terminated > {folder}/ended; exit 1' TERM
touch {folder}/started
while true; do sleep 0.1; done
"""
    (folder / "git").write_text(program)
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def test_slow_git_is_terminated_and_the_dirty_state_is_unknown(repository, slow_git):
    facts = Git(repository).facts()

    assert len(facts["git_commit"]) == 40
    assert facts["git_dirty"] == "unknown"
    assert (slow_git / "ended").read_text() == "terminated\n", "SIGTERM lets git remove its locks"


@pytest.mark.alone
def test_aggregator_does_not_wait_for_git(slow_git, repository, launch, tmp_path):
    job = launch.python(shutil.copy(SCRIPTS / "loop.py", repository / "loop.py"), "--until", tmp_path / "enough")
    until(lambda: (slow_git / "started").exists())
    until(lambda: job.blocks)
    has_ended = (slow_git / "ended").exists()
    (tmp_path / "enough").touch()

    assert not has_ended, "git must still run when a window is written"
    assert job.done().ledger.facts["git_dirty"] == "unknown"


def test_result_of_git_is_written_to_run_json(repository, launch, tmp_path):
    job = launch.python(shutil.copy(SCRIPTS / "loop.py", repository / "loop.py"), "--until", tmp_path / "enough")
    until(lambda: job.num_windows and job.ledger.facts.get("git_dirty") is False)
    (tmp_path / "enough").touch()

    assert job.done().ledger.facts["git_commit"] == git(repository, "rev-parse", "HEAD").strip()


@pytest.mark.parametrize("by_agent", [True, False])
def test_folder_of_a_served_aggregator_is_not_that_of_the_training(repository, monkeypatch, by_agent):
    monkeypatch.chdir(repository)
    facts = RunFacts(Orders(Config(), "0123", "tcp://127.0.0.1:1", "", facts={"command": ["x"]}, by_agent=by_agent))

    found = []
    facts.read_slow_facts(found.append)
    assert ("git_commit" in found[0].facts) is by_agent


def test_versions_of_packages_are_recorded():
    facts = host_facts()

    assert facts["packages"]["msgspec"]
    assert json.loads(json.dumps(facts)) == facts
