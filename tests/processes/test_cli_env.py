"""The command effllm env: exports for a shell, and a check of settings."""

import re
import subprocess
import sys

import pytest
from cases import cases

from effllm.config.settings import ALL_VARIABLES, VARIABLES
from effllm.config.switches import PREFIX


def evaluated(cli, statement, **variables):
    """Return the EFFICIENTLLM_* variables of a shell that has evaluated ``statement``."""
    command = f"{statement.replace('effllm', f'{sys.executable} -m effllm')}; env -0"
    done = subprocess.run(["sh", "-c", command], env=cli.environ(**variables), capture_output=True, text=True)
    pairs = (line.partition("=")[::2] for line in done.stdout.split("\0"))
    return {name.removeprefix(PREFIX): value for name, value in pairs if name.startswith(PREFIX)}


@pytest.mark.parametrize(
    "statement", ['eval "$(effllm env)"', 'eval "$(effllm env --shell)"', "eval $(effllm env --shell)"]
)
def test_evaluated_output_exports_every_default(cli, statement):
    values = evaluated(cli, statement)

    assert values.pop("ATTACH") == "1"
    assert values == {variable.name: variable.default for variable in VARIABLES if variable.default}


def test_variables_that_are_already_set_are_kept_and_quoted(cli):
    awkward = "my runs; it's $(false)"

    values = evaluated(cli, 'eval "$(effllm env)"', EFFICIENTLLM_RUN_DIR=awkward, EFFICIENTLLM_LOG_INTERVAL="7")

    assert (values["RUN_DIR"], values["LOG_INTERVAL"]) == (awkward, "7")


def test_every_variable_is_listed_with_its_meaning(cli):
    shown = cli.call("env").stdout
    prose = " ".join(shown.replace("\n# ", "\n").split())

    assert max(map(len, shown.splitlines())) <= 80
    names = re.findall(rf"^(?:# )?export {PREFIX}(\w+)=", shown, re.MULTILINE)
    assert names == [variable.name for variable in ALL_VARIABLES]
    for variable in ALL_VARIABLES:
        assert f"{variable.meaning} Allowed: {variable.value_type.allowed}." in prose
    common = re.findall(rf"{PREFIX}(\w+)=", shown.partition("# ---- Cost")[0])
    assert common == [
        "METRICS_ENABLED", "ATTACH", "LOG_INTERVAL", "SINKS", "RUN_DIR", "RUN_NAME", "TAGS", "PEAK_TFLOPS",
    ]  # fmt: skip
    assert f"export {PREFIX}ATTACH=1\n" in shown


@cases(
    ("name", "value", "expected"),
    [
        ("EFFICIENTLLM_SINKS", "consol", "there is no sink 'consol'; available sinks: console,"),
        ("EFFICIENTLLM_DEVICE", "gpu", "there is no such device; available devices: auto, "),
        ("EFFICIENTLLM_LOG_INTERVALL", "5", "did you mean EFFICIENTLLM_LOG_INTERVAL?"),
        ("EFFLLM_LOG_INTERVAL", "5", "did you mean EFFICIENTLLM_LOG_INTERVAL?"),
        ("EFFICIENTLLM_ATTACH", "perhaps", "EFFICIENTLLM_ATTACH='perhaps' is not usable: must be true, 1"),
        ("EFFICIENTLLM_RUN_DIR", "/proc/x", "/proc/x cannot be written: "),
        ("EFFICIENTLLM_SINKS", "tensorboard:dir=/proc/x", "/proc/x cannot be written: "),
        ("EFFICIENTLLM_SINKS", "console:colour=red", "'console' has no option 'colour'; available options: format"),
        ("EFFICIENTLLM_INTERFACE", "ib7", "EFFICIENTLLM_INTERFACE='ib7': this host has no such interface"),
        ("EFFICIENTLLM_INTERFACE", "lo", ""),
        ("EFFICIENTLLM_LOG_INTERVAL", "50", ""),
    ],
)
def test_check_names_a_wrong_setting_and_the_valid_names(cli, name, value, expected):
    done = cli.call("env", "--check", **{name: value})

    is_usable = name == "EFFICIENTLLM_INTERFACE" or not expected
    assert (done.returncode, done.stdout) == (0 if is_usable else 2, "")
    assert done.stderr.count("\n") == bool(expected)
    assert expected in done.stderr


@cases("option", [[], ["--check"], ["--shell"]])
def test_wrong_values_print_one_line_each_and_export_nothing(cli, option):
    done = cli.call("env", *option, EFFICIENTLLM_LOG_INTERVAL="0", EFFICIENTLLM_MIN_COVERAGE="2")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "effllm: EFFICIENTLLM_LOG_INTERVAL='0' is not usable: must be a whole number of at least 1, or auto",
        "effllm: EFFICIENTLLM_MIN_COVERAGE='2' is not usable: must be a ratio from 0 to 1",
    ]


@pytest.mark.parametrize(
    ("package", "name", "value", "extra"),
    [
        ("prometheus_client", "SINKS", "console,prometheus", "prometheus"),
        ("urllib3", "NODE_POWER", "https://bmc.example/redfish/v1", "redfish"),
    ],
)
def test_setting_without_its_package_shows_the_pip_command(cli, package, name, value, extra):
    cli.script("raise ImportError('not installed')", f"{package}.py")

    done = cli.run("env", "--check", PYTHONPATH=str(cli.folder), **{PREFIX + name: value})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"pip install 'effllm[{extra}]'" in done.stderr


@pytest.mark.parametrize("command", [["env", "--check"], ["run", "train.py"]])
def test_commands_env_and_run_import_no_terminal_packages(cli, command):
    cli.script("")
    start = [sys.executable, "-X", "importtime", "-m", "effllm", *command]

    done = subprocess.run(start, env=cli.environ(), cwd=cli.folder, capture_output=True, text=True, check=True)

    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "effllm" in imported
    assert not imported & {"typer", "click", "rich", "zmq", "torch", "tensorboard", "pynvml"}
