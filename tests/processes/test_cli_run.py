"""The command effllm run: a script runs in the same way as with python, and its run folder is complete."""

import json
import signal
import subprocess
import sys

import pytest
from cli_process import LOOP, QUIET, read_until


@pytest.mark.parametrize(
    ("ending", "code", "status"),
    [
        ("", 0, "completed"),
        ("sys.exit(0)", 0, "completed"),
        ("sys.exit(3)", 3, "failed"),
        ("sys.exit('no data')", 1, "failed"),
        ("raise KeyError('step')", 1, "failed"),
    ],
)
def test_exit_status_of_the_script_is_returned_and_recorded(cli, ending, code, status):
    done = cli.run("run", cli.script(LOOP + ending), **QUIET)

    assert done.returncode == code
    assert cli.summary()["status"] == status
    assert cli.summary()["tokens"] == 1000


def test_interrupted_script_ends_by_sigint(cli):
    script = cli.script(LOOP + "print('ready', flush=True)\ntime.sleep(60)")
    process = cli.start("run", script, **QUIET)
    read_until(process, "ready")

    process.send_signal(signal.SIGINT)

    assert process.wait(60) == -signal.SIGINT
    assert cli.summary()["status"] == "interrupted"


SAME = {
    "error": "def step():\n    raise KeyError('x')\n\nstep()\n",
    "syntax": "x = = 3\n",
    "import": "import nowhere\n",
    "output": """
import atexit, sys, __main__
print(__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
mine = "its own until the end"
atexit.register(lambda: print(__main__.mine))
""",
    "module": "import sys\nprint(__name__, __spec__.name, sys.argv, sys.path[0])",
}


@pytest.mark.parametrize("name", SAME)
def test_script_has_the_same_output_and_traceback_as_with_python(cli, name):
    (cli.folder / "package").mkdir()
    script = cli.script(SAME[name], "package/train.py")
    arguments = ["-m", "package.train", "--lr", "1"] if name == "module" else [script, "-x", "1"]
    expected = subprocess.run([sys.executable, *arguments], cwd=cli.folder, capture_output=True, text=True, check=False)

    done = cli.run("run", *arguments)
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    if expected.returncode:
        assert done.stderr == expected.stderr


def test_forked_child_does_not_close_the_run(cli):
    script = cli.script(
        LOOP
        + """
if os.fork() == 0:
    sys.exit(7)
os.wait()
collector.record_iteration_start()
collector.record_iteration_end(100, 1)
"""
    )

    assert cli.run("run", script, **QUIET).returncode == 0
    assert (cli.summary()["status"], cli.summary()["tokens"]) == ("completed", 1100)


def test_script_without_effllm_calls_is_reported_in_one_line(cli):
    done = cli.run("run", cli.script("print('trained')"))

    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("\n") == 1
    assert "did not call effllm" in done.stderr


def test_secrets_in_the_command_are_redacted_in_the_run_folder(cli):
    cli.run("run", cli.script(LOOP), "--api-key", "-Zx81Qw9", "hf_AbCdEfGhIjKlMnOpQrSt", **QUIET)

    [path] = cli.folder.glob("efficientllm_runs/*/run.json")
    assert "Zx81Qw9" not in path.read_text()
    assert json.loads(path.read_text())["command"][1:] == ["--api-key", "<redacted>", "<redacted>"]


def test_off_means_off(cli):
    done = cli.run("run", cli.script(LOOP), EFFICIENTLLM_METRICS_ENABLED="false")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (cli.folder / "efficientllm_runs").exists()


@pytest.mark.torch
@pytest.mark.long
def test_all_ranks_of_torchrun_share_one_run(cli):
    pytest.importorskip("torch")
    script = cli.script("import torch.distributed\n" + LOOP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
    command = [*torchrun, "--nproc_per_node", "2", "-m", "effllm", "run", script]

    subprocess.run(command, env=cli.environ(**QUIET), cwd=cli.folder, capture_output=True, timeout=200, check=True)

    summary = cli.summary()
    assert (summary["status"], summary["tokens"], summary["coverage"]["ranks_expected"]) == ("completed", 2000, 2)
