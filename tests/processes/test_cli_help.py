"""Help and version of the command line, and the tables of metrics and events."""

import json
import signal
import subprocess
import sys

import pytest
from cases import cases
from run_folders import write_run

from effllm import __version__
from effllm.devices import device_names
from effllm.metrics import METRICS
from effllm.metrics.output_names import chart_tag
from effllm.records.events import KINDS

COMMANDS = [
    "demo", "check", "profile", "env", "run", "serve", "simulate", "watch", "fit", "report", "inspect", "compare",
    "campaign", "runs", "explain",
]  # fmt: skip


@cases("command", COMMANDS)
def test_help_of_every_command_shows_examples_in_80_columns(cli, command):
    done = cli.call(command, "--help")

    assert (done.returncode, done.stderr, "later version" in done.stdout) == (0, "", False)
    assert f"effllm {command}" in done.stdout.split("Examples:")[1]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_effllm_without_a_command_lists_the_commands(cli):
    done = cli.call()

    shown = done.stdout + done.stderr
    assert [command for command in COMMANDS if f"\n  {command}  " in shown] == COMMANDS


def test_list_of_the_commands_imports_no_command(cli):
    code = (
        "import atexit, sys; from effllm import cli; sys.argv[1:] = ['--help']\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); cli.main()"
    )

    done = subprocess.run([sys.executable, "-c", code], env=cli.environ(), capture_output=True, text=True, check=True)

    assert {name for name in done.stderr.split() if name.startswith("effllm.commands.")} == {"effllm.commands.app"}


def test_version_option_prints_the_package_version(cli):
    assert cli.run("--version").stdout == f"effllm {__version__}\n"


#: Wrong use by command: arguments, the only line or a part of the text, and settings.
ONE_LINE = {
    "demo": [
        (["--keep-alive", "soon"], "effllm demo: --keep-alive soon: expected "),
        (
            [],
            "EFFICIENTLLM_LOG_INTERVAL='0' is not usable: must be a whole number of at least 1",
            {"LOG_INTERVAL": "0"},
        ),
    ],
    "watch": [(["--vllm", "file:///etc/passwd"], "http")],
}
OTHERS = {
    "dmeo": [([], "dmeo")],
    "check": [(["--device", "tpu"], f"no such device; available devices: auto, {', '.join(device_names())}\n")],
    "env": [(["--chekc"], "'--chekc' is not one of --check, --shell, --markdown")],
    "demo": [
        ([option, value], option)
        for option, value in (("--ranks", "0"), ("--iterations", "none"), ("--step-seconds", "-1"), ("--rank", "2"))
    ],
}


@pytest.mark.parametrize("table", [ONE_LINE, OTHERS], ids=["one line", "others"])
def test_usage_error_exits_with_status_2(cli, table):
    for command, arguments, expected, *settings in (
        (command, *case) for command, listed in table.items() for case in listed
    ):
        variables = {f"EFFICIENTLLM_{name}": value for one in settings for name, value in one.items()}
        done = cli.call(command, *arguments, **variables)

        assert (done.returncode, done.stdout, expected in done.stderr) == (2, "", True), (command, arguments, done)
        assert done.stderr.count("\n") == 1 or table is OTHERS, done


def test_everything_that_effllm_shows_is_explained(cli):
    done = cli.call("explain")

    shown = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    for entry in METRICS.values():
        bases = ", ".join(entry.bases) + ("" if entry.chart else "; no chart")
        assert f"{chart_tag(entry.tag(entry.bases[0]))} (metric, {entry.unit}) {entry.help} Of: {bases}." in shown
    for name, kind in KINDS.items():
        assert f"{name} (event, {kind.level}" in shown
        assert kind.help in shown
    assert "device_idle (cause) devices without work inside the steps. Next: " in shown
    assert "EFFICIENTLLM_LOG_INTERVAL (setting, Common settings) Number of iterations" in shown


def explained(cli, name):
    """Return (name, what, text) of each entry."""
    return [(one["name"], one["what"], one["text"]) for one in json.loads(cli.call("explain", name, "--json").stdout)]


@cases("name", ["mfu_ratio", "EffLLM/mfu", "MFU-RATIO", "throughput/mfu_ratio"])
def test_a_metric_is_explained_by_its_name_or_a_tag(cli, name):
    [(_, what, text)] = explained(cli, name)

    assert (what, "Model FLOPs utilization" in text) == ("metric", True)


def test_a_column_is_explained_for_each_table_that_has_it(cli):
    shown = [entry[:2] for entry in explained(cli, "energy_j")]
    [(_, _, run_to_date)] = explained(cli, "runs.run_energy_joules_per_token")

    assert shown == [("windows.energy_j", "column"), ("ranks.energy_j", "column")]
    assert run_to_date.endswith("Base: run to date.")


def test_a_gpu_is_explained_with_its_rates_and_their_source(cli):
    [(name, what, text)] = explained(cli, "nvidia a100 80gb pcie")

    assert (name, what) == ("NVIDIA A100 80GB PCIe", "GPU")
    for part in ("bf16 312", "Source (quoted): NVIDIA A100 datasheets 1758950", "off by -5.8% to -5.5%"):
        assert part in text


@cases("command", ["explain", "env"])
def test_a_closed_pipe_ends_a_command_without_a_word(cli, command):
    line = f"{sys.executable} -m effllm {command} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)

    assert (done.stdout.count("\n"), done.stderr) == (1, "")
    assert done.returncode in (0, 128 + signal.SIGPIPE)


def test_a_wrong_name_has_the_nearest_ones(cli):
    done = cli.call("explain", "mfu_rato")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("effllm explain: 'mfu_rato' has no entry; near: mfu_ratio")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_table_is_printed_in_every_encoding_of_the_terminal(cli, encoding):
    for at in range(2):
        write_run(cli.folder / f"runs/{at}", {"al_seconds": 1.0 + at})

    done = cli.run("compare", "runs", "--paper", PYTHONIOENCODING=encoding)

    assert (done.returncode, done.stderr) == (0, "")
    assert "AL ?" in done.stdout  # an arrow
