"""A script may import any framework first; then torch and the hooks of effllm are loaded during that import."""

import os
import subprocess
import sys

import pytest

LOOK = """
import sys, torch
from effllm.hooks import TARGETS, _imports
print(sorted(name for name in TARGETS if name in sys.modules and name in _imports._waiting_hooks))
print("effllm.hooks.optimizer" in sys.modules, len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks))
"""


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "from transformers import Trainer",
        "import trl; from trl import GRPOTrainer",
        "from accelerate import Accelerator",
        "from lightning.pytorch import Trainer",
        "import pytorch_lightning",
    ],
)
def test_hooks_are_installed_for_each_framework_imported_first(line):
    for package in line.replace(";", " ").split():
        if package in ("transformers", "trl", "accelerate", "pytorch_lightning") or package.startswith("lightning"):
            pytest.importorskip(package.split(".")[0], reason=f"needs {package}")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EFFICIENTLLM_")}

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", line + LOOK],
        env=environ | {"EFFICIENTLLM_ATTACH": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[]", "True 1"]
    assert "[EfficientLLM]" not in done.stderr
