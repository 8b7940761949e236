"""The configurations and commands of a guide to another energy log; docs/porting.md lists the differences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "integration" / "sft_play"

METRICS = """
metrics:
  enable_energy_logging: true
  sample_interval_s: 0.05
  warmup_s: 60.0
  log_vram_every_s: 1.0
  results_csv: "outputs/energy_results.csv"
"""

READ = """
import dataclasses, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from settings import read_settings
import train
settings = read_settings(Path(sys.argv[2]))
train.configure(settings, tensorboard=False)
variables = {name: value for name, value in os.environ.items() if name.startswith("EFFICIENTLLM_")}
json.dump([dataclasses.asdict(settings), variables], sys.stdout)
"""


def read(path):
    """Return the settings of a YAML file, and the variables that the training script sets."""
    command = [sys.executable, "-c", READ, str(FOLDER / "scripts"), str(path)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_section_metrics_is_that_of_the_configurations_and_sets_the_effllm_variables(tmp_path):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    (tmp_path / "run.yaml").write_text(METRICS)
    settings, variables = read(tmp_path / "run.yaml")

    for name in ("bnb", "unsloth"):
        complete, _ = read(FOLDER / "configs" / f"run_{name}.yaml")
        assert complete["metrics"] == settings["metrics"] == yaml.safe_load(METRICS)["metrics"]
    assert variables == {
        "EFFICIENTLLM_METRICS_ENABLED": "true",
        "EFFICIENTLLM_COLLECTION_INTERVAL": "0.05",
        "EFFICIENTLLM_WARMUP": "60s",
        "EFFICIENTLLM_SINKS": "none",
        "EFFICIENTLLM_RUN_DIR": "outputs/runs",
    }


@pytest.mark.parametrize("backend", ["bnb", "unsloth"])
def test_make_targets_of_a_backend_use_its_configuration(backend):
    """``make -n`` prints the commands of the targets."""
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", "-n"]
    done = subprocess.run(
        [*command, f"measure-{backend}", f"train-{backend}-tb"], cwd=FOLDER, capture_output=True, text=True, check=True
    )

    line = f"{sys.executable} scripts/train.py --config configs/run_{backend}.yaml"
    assert done.stdout == f"{line}\n{line} --tensorboard\n"
