"""launch/efficientllm_config.sh, sourced by bash and zsh."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from effllm.config.settings import VARIABLES
from effllm.config.switches import ATTACH, PREFIX

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "launch" / "efficientllm_config.sh"
SHELLS = {"bash": ["bash", "--noprofile", "--norc", "-c"], "zsh": ["zsh", "-f", "-c"]}

#: Commands that print the state of a shell: names of variables and functions, and options with their values.
LISTING = {
    "bash": "compgen -v; compgen -A function; set +o; shopt",
    "zsh": "print -l ${(k)parameters} ${(k)functions}; setopt; unsetopt",
}


@pytest.fixture(params=SHELLS)
def shell(request):
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


def run(shell, script, cwd=None, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    return subprocess.run(
        [*SHELLS[shell], script],
        env={**environment, "PYTHON": "true", **variables},  # a fake python that always succeeds
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def exported(shell, **variables):
    shown = run(shell, f"source '{CONFIG}' >/dev/null; env", **variables).stdout
    return dict(line.split("=", 1) for line in shown.splitlines() if line.startswith(PREFIX))


def test_strict_shell_can_source_the_file_twice_in_any_folder(shell, tmp_path):
    done = run(shell, f"set -eu; source '{CONFIG}'; source '{CONFIG}'; echo done", cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("done\n")


def test_defaults_of_the_shell_file_equal_those_of_the_package(shell):
    defaults = {PREFIX + variable.name: variable.default for variable in VARIABLES}

    values = exported(shell)

    assert values.pop(ATTACH) == "1"
    assert sorted(values) == [
        PREFIX + name
        for name in ("COLLECTION_INTERVAL", "HISTORY_SIZE", "LOG_INTERVAL", "METRICS_ENABLED", "RUN_DIR", "SINKS")
    ]
    assert values == {name: defaults[name] for name in values}


def test_variable_that_is_already_set_is_kept(shell):
    assert exported(shell, EFFICIENTLLM_LOG_INTERVAL="7")["EFFICIENTLLM_LOG_INTERVAL"] == "7"


@pytest.mark.parametrize("switch", ["true", "TRUE", " yes ", "on", "1"])
def test_summary_of_the_shell_file_prints_a_heading_and_aligned_lines(shell, switch):
    on = {"EFFICIENTLLM_LOG_INTERVAL": "25", "EFFICIENTLLM_METRICS_ENABLED": switch}
    heading, *lines = run(shell, f"source '{CONFIG}'", **on).stdout.splitlines()

    assert heading == "EfficientLLM metrics"
    assert "  reports      every 25 iterations" in lines
    assert all(line.startswith("  ") and line[14] == " " and line[15] != " " for line in lines)


@pytest.mark.parametrize("switch", ["false", "0", " OFF "])
def test_disabled_metrics_print_one_line_and_skip_all_checks(shell, switch):
    done = run(shell, f"source '{CONFIG}'", EFFICIENTLLM_METRICS_ENABLED=switch, PYTHON="/nowhere/python")

    assert done.returncode == 0
    assert done.stdout == f"EfficientLLM metrics are off (EFFICIENTLLM_METRICS_ENABLED={switch})\n"
    assert done.stderr == ""


def test_python_without_effllm_prints_one_line_and_no_error(shell):
    done = run(shell, f"set -eu; source '{CONFIG}'", PYTHON="false")

    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "false cannot import effllm: no metrics until effllm is installed" in done.stderr


def test_effllm_in_the_current_folder_is_not_taken_as_installed(shell, tmp_path):
    libraries = sysconfig.get_path("purelib")
    if (Path(libraries) / "effllm").exists():
        pytest.skip("effllm is not an editable install, so its libraries cannot be used without it")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{libraries}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)

    done = run(shell, f"source '{CONFIG}'", cwd=REPOSITORY, PYTHON=str(python))

    assert "cannot import effllm" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "python", "message"),
    [
        ("LOG_INTERVAL", "0", sys.executable, "EFFICIENTLLM_LOG_INTERVAL='0'"),
        (
            "METRICS_ENABLED",
            "flase",
            "true",
            "EFFICIENTLLM_METRICS_ENABLED='flase' is not usable: must be true, 1, yes or on, or",
        ),
    ],
)
def test_wrong_value_prints_an_error_and_does_not_exit_the_shell(shell, name, value, python, message):
    script = f"source '{CONFIG}' || echo status $?; echo alive"
    done = run(shell, script, PYTHON=python, **{f"EFFICIENTLLM_{name}": value})

    assert done.stdout.endswith("status 1\nalive\n")
    assert message in done.stderr


@pytest.mark.parametrize("python", ["true", "false"])
def test_only_exported_variables_remain_in_the_shell(shell, tmp_path, python):
    before, after = tmp_path / "before", tmp_path / "after"
    listing = LISTING[shell]

    run(shell, f"{{ {listing}; }} >'{before}'; source '{CONFIG}'; {{ {listing}; }} >'{after}'", PYTHON=python)

    changed = set(after.read_text().splitlines()) ^ set(before.read_text().splitlines())
    assert sum(name.startswith(PREFIX) for name in changed) == 7
    assert {name for name in changed if not name.startswith(PREFIX)} <= {"PIPESTATUS", "BASH_REMATCH", "_"}
