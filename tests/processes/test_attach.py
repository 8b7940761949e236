"""``import torch`` loads effllm; the import must never fail, must be cheap, and must not start a process or thread."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import effllm

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = pytest.mark.torch

PACKAGE = Path(effllm.__file__).parent

PRINT_HOOKS = """
import sys, torch
print("hooks" if "effllm.hooks" in sys.modules else "no hooks", torch.__name__)
"""


def run(program, environ=None, *options, cwd=None):
    """Run a program and return its stdout and stderr; EFFICIENTLLM_ATTACH in ``environ`` attaches effllm."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EFFICIENTLLM_", "TORCH_DEVICE_BACKEND"))}
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(program)],
        env=clean | (environ or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


ON = {"EFFICIENTLLM_ATTACH": "1"}


LONG = {"marks": pytest.mark.long}
WITHOUT = (
    "import sys\nfor name in ('msgspec', 'zmq', 'psutil', 'tensorboard', 'rich', 'typer'): sys.modules[name] = None\n"
)


@pytest.mark.parametrize(
    ("program", "environ", "printed"),
    [
        (PRINT_HOOKS, {}, "no hooks torch"),
        pytest.param(PRINT_HOOKS, {"EFFICIENTLLM_ATTACH": "0"}, "no hooks torch", **LONG),
        pytest.param(PRINT_HOOKS, ON | {"EFFICIENTLLM_METRICS_ENABLED": "false"}, "no hooks torch", **LONG),
        pytest.param(PRINT_HOOKS, ON | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "no hooks torch", **LONG),
        ("import sys; print([name for name in sys.modules if name.split('.')[0] == 'effllm'])", ON, "[]"),
        (WITHOUT + "import torch; print('imported')", ON, "imported"),  # the dependencies of effllm are missing
    ],
)
def test_import_is_possible_and_installs_no_hooks_without_the_variables(program, environ, printed):
    assert run(program, environ) == (f"{printed}\n", "")


def test_import_of_torch_installs_hooks_starts_no_process_and_writes_no_file(tmp_path):
    program = f"{PRINT_HOOKS}\nimport os, psutil\nprint(psutil.Process().children(), os.listdir())"

    shown = run(program, ON | {"EFFICIENTLLM_RUN_DIR": str(tmp_path / "runs")}, cwd=tmp_path)

    assert shown == ("hooks torch\n[] []\n", "")


# The file is not removed, because an editable install would then find the original file.
GONE = "raise ModuleNotFoundError('gone')"
BROKEN = {
    "a hook file that is no Python": ("hooks/optimizer.py", "this is not Python"),
    "hooks that are no Python": ("hooks/__init__.py", "def ("),
    "hooks that raise": ("hooks/__init__.py", "raise SystemError('broken')"),
    "hooks without their functions": ("hooks/__init__.py", ""),
    "a configuration that raises": ("config/settings.py", "raise OSError(28, 'No space left on device')"),
    "a configuration that is gone": ("config/settings.py", GONE),
    "a missing import watch": ("hooks/_imports.py", GONE),
    "a collector that is gone": ("trainer/collector.py", GONE),
    "a ring that is no Python": ("records/ring.py", "x = ="),
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(
            what, marks=() if what in ("hooks that raise", "a configuration that is gone") else pytest.mark.long
        )
        for what in BROKEN
    ],
)
def test_training_with_torch_works_if_effllm_is_broken(what, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "effllm", ignore=shutil.ignore_patterns("__pycache__"))
    file, text = BROKEN[what]
    (tmp_path / "effllm" / file).write_text(text)
    program = """
        import torch, effllm
        print(effllm.__file__)
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(weight.tolist())
    """

    out, errors = run(program, ON | {"EFFICIENTLLM_RUN_DIR": str(tmp_path), "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)

    where, weight = out.splitlines()
    assert where.startswith(str(tmp_path))
    assert weight == "[-0.5, -0.5]"
    lines = [line for line in errors.splitlines() if line.startswith("[EfficientLLM]")]
    assert 1 <= len(lines) <= 4, errors  # one line for each module that cannot be hooked, and one line at the end
    assert "Traceback" not in errors


def test_effllm_run_attaches_without_the_entry_point(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PRINT_HOOKS)
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "EFFICIENTLLM_RUN_DIR": str(tmp_path)}
    program = f"import sys; sys.argv[1:] = ['run', {str(script)!r}]; from effllm.cli import main; sys.exit(main())"

    out, _ = run(program, environ)

    assert out == "hooks torch\n"


LOOP = """
import torch

torch.manual_seed(7)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = (model(torch.ones(4, 8)) - 1).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""


def test_unmodified_loop_is_measured_after_sourcing_only_the_shell_file_and_its_losses_are_unchanged(tmp_path):
    root = PACKAGE.parent
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    launch = f". {root}/launch/efficientllm_config.sh && exec {sys.executable} {script}"
    environ = dict(os.environ) | {"EFFICIENTLLM_RUN_DIR": str(tmp_path), "EFFICIENTLLM_RUN_NAME": "run"}
    environ |= {"EFFICIENTLLM_LOG_INTERVAL": "2", "PYTHON": sys.executable}

    without, _ = run(LOOP)
    done = subprocess.run(["sh", "-c", launch], env=environ, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr
    assert "[EfficientLLM Metrics] Iteration 4:" in done.stdout
    losses = [line for line in done.stdout.splitlines() if line.startswith(("0x", "-0x"))]
    assert losses == without.splitlines()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["iterations"] in (5, 6)  # the start of the first iteration may be unknown
