"""Scripts in launch/ that start training, with a fake torchrun that prints its arguments or with the real torchrun."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from jobs import unused_port

from effllm.config.switches import PREFIX

REPOSITORY = Path(__file__).parents[2]
LAUNCH = REPOSITORY / "launch"
TRAIN = LAUNCH / "train_with_efficientllm.sh"
TORCHRUN_HERE = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node"]


@pytest.fixture
def commands(tmp_path):
    """Return a folder that is first on PATH, with a fake python that always succeeds and a fake torchrun."""
    folder = tmp_path / "bin"
    folder.mkdir()
    add_command(folder, "python3", "exit 0")
    add_command(folder, "torchrun", 'printf "%s\\n" "$@"')
    return folder


def add_command(folder, name, script):
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def environment(commands, **variables):
    own = ("PYTHON", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "NPROC_PER_NODE")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k not in own}
    return {**inherited, "PATH": f"{commands}:/usr/bin:/bin", **variables}


def start(script, *arguments, commands, cwd=None, **variables):
    return subprocess.run(
        ["bash", script, *arguments],
        env=environment(commands, **variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def called_with(done):
    """Return the arguments that the last command printed, after the summary of the configuration."""
    return done.stdout.split("efficientllm_runs\n")[1].splitlines()


@pytest.fixture
def train(commands, tmp_path):
    """Return a function that runs the launch script in a folder with a training script."""
    (tmp_path / "train.py").touch()
    return partial(start, TRAIN, commands=commands, cwd=tmp_path)


def test_torchrun_starts_a_python_script_with_a_process_per_gpu(train, tmp_path):
    (tmp_path / "my training.py").touch()

    done = train("my training.py", "8", "--lr", "3e-4")

    assert called_with(done) == [*TORCHRUN_HERE, "8", "my training.py", "--lr", "3e-4"]


def test_run_configuration_starts_its_training_system(train):
    demo = str(REPOSITORY / "configs" / "demo.yaml")

    done = train(demo, "2", "--tp", "2")

    script = str(REPOSITORY / "integration" / "megatron_core" / "train.py")
    assert called_with(done) == [*TORCHRUN_HERE, "2", script, "--config", demo, "--tp", "2"]
    assert Path(script).is_file()


@pytest.mark.parametrize(("num_gpus", "forced"), [(1, ""), (4, "1")])
def test_llama_factory_configuration_starts_llama_factory(train, commands, tmp_path, num_gpus, forced):
    printed = '"$@" "$NPROC_PER_NODE" "${FORCE_TORCHRUN:-}" "$EFFICIENTLLM_ATTACH"'
    add_command(commands, "llamafactory-cli", f'printf "%s\n" {printed}')
    (tmp_path / "lora sft.yaml").write_text("model_name_or_path: tiny\nstage: sft\n")

    done = train(tmp_path / "lora sft.yaml", str(num_gpus), "max_steps=3")

    assert called_with(done) == ["train", str(tmp_path / "lora sft.yaml"), "max_steps=3", str(num_gpus), forced, "1"]


def test_number_of_gpus_is_given_to_a_shell_script(train, tmp_path):
    script = tmp_path / "pretrain.sh"
    script.write_text('echo "$GPUS_PER_NODE $NPROC_PER_NODE $EFFICIENTLLM_METRICS_ENABLED $*"')

    assert called_with(train(str(script), "4", "7B", "bf16")) == ["4 4 true 7B bf16"]


def test_interpreter_in_the_variable_python_is_used(train, commands):
    add_command(commands, "chosen", 'case "$1" in -m) shift; printf "%s\\n" "$@" ;; esac')
    add_command(commands, "torchrun", "echo the wrong one")

    done = train("train.py", "1", PYTHON=str(commands / "chosen"))

    assert called_with(done)[-7:] == ["torch.distributed.run", *TORCHRUN_HERE, "1", "train.py"]


@pytest.mark.parametrize(
    ("name", "program", "code", "message"),
    [
        ("torchrun", "exit 7", 7, ""),
        ("torchrun", None, 2, "torchrun is not on PATH"),
        ("python3", 'test "$1" = -c', 1, ""),  # effllm can be imported, but it rejects the variables
    ],
)
def test_exit_status_of_a_training_that_fails_or_does_not_start(train, commands, name, program, code, message):
    if program is None:
        (commands / name).unlink()
    else:
        add_command(commands, name, program)

    done = train("train.py", "1")

    assert done.returncode == code
    assert message in done.stderr
    assert "--standalone" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a script and a number of GPUs are needed"),
        (["missing.py", "2"], "there is no file missing.py"),
        (["train.py", "two"], "at least 1, not 'two'"),
        (["unknown.yaml", "2"], "there is no integration/unheard_of/train.py"),
        (["outside.yaml", "2"], "has no 'system:' key"),
        (["sft.yaml", "1"], "llamafactory-cli is not on PATH"),
    ],
)
def test_wrong_arguments_print_the_reason_and_the_usage(train, tmp_path, arguments, message):
    (tmp_path / "sft.yaml").write_text("stage: sft\n")
    (tmp_path / "unknown.yaml").write_text("system: unheard_of\n")
    (tmp_path / "outside.yaml").write_text("system: ../../elsewhere\n")

    done = train(*arguments)

    assert done.returncode == 2
    assert message in done.stderr
    assert "sft.yaml" in arguments or (done.stdout == "" and "usage: train_with_efficientllm.sh" in done.stderr)


def test_help_of_the_launch_script_shows_examples_and_exits_with_0(train):
    done = train("-h")

    assert (done.returncode, done.stderr) == (0, "")
    assert "launch/train_with_efficientllm.sh configs/demo.yaml 2" in done.stdout


@pytest.mark.torch
@pytest.mark.long
def test_two_torchruns_on_one_machine_run_one_job_of_two_nodes(commands, tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "say.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    add_command(commands, "torchrun", f'exec "{sys.executable}" -m torch.distributed.run "$@"')
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "NPROC_PER_NODE": "1"}

    nodes = [
        subprocess.Popen(
            ["bash", str(LAUNCH / "torchrun_two_nodes.sh"), str(script)],
            env=environment(commands, NODE_RANK=str(node), **job),
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    printed = [ended(node) for node in nodes]

    assert [node.returncode for node in nodes] == [0, 0]
    assert [text.splitlines()[-1] for text in printed] == ["rank 0 of 2", "rank 1 of 2"]


def ended(process):
    try:
        return process.communicate(timeout=200)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # after SIGTERM, torchrun ends its processes
        process.communicate()
        raise


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "NODE_RANK"])
def test_missing_variable_of_a_node_is_reported_with_its_name(commands, missing):
    place = {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0"}
    del place[missing]

    done = start(LAUNCH / "torchrun_two_nodes.sh", "train.py", commands=commands, **place)

    assert done.returncode != 0
    assert f"{missing}: set it to" in done.stderr


def test_slurm_script_starts_torchrun_on_each_node_of_its_job(commands):
    add_command(commands, "scontrol", "printf 'node7\\nnode8\\n'")
    add_command(commands, "srun", 'shift; SLURM_NODEID=1 exec "$@"')
    slurm = {
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_JOB_ID": "31234",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }

    done = start(LAUNCH / "slurm.sbatch", "train.py", "--lr", "1", commands=commands, **slurm)

    node = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "node7", "--master_port", "21234"]
    assert called_with(done) == [*node, "--nproc_per_node", "8", "train.py", "--lr", "1"]


def test_shellcheck_finds_nothing_in_the_shell_scripts():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    scripts = [*LAUNCH.iterdir(), *(REPOSITORY / ".ci").iterdir()]

    done = subprocess.run(
        [shellcheck, "--external-sources", *scripts], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, "")
