"""Writes tests/golden/run_folder_5, the run folder of many tests: ``python tests/golden_run.py``.

The loop is real; its GPUs are those of the library in tests/nvml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nvml_library
from nvml_library import GIB, Gpu, Trace, flat, sine

TESTS = Path(__file__).resolve().parent
NAME = "run_folder_5"
SETTINGS = {
    "METRICS_ENABLED": "true",
    "DEVICE": "nvml",
    "RUN_NAME": NAME,
    "TAGS": "project=llama,config=base,debug",
    "PRICE_PER_GPU_HOUR": "2.5",
    "PRICE_PER_KWH": "0.2",
    "CARBON_INTENSITY": "400",
    "PROFILE_EVERY": "10",
    "LOG_INTERVAL": "20",
    "COLLECTION_INTERVAL": "0.1",
    "BASELINE_SECONDS": "1",
    "SINKS": "none",
}
SLURM = {"JOB_ID": "4711", "JOB_NAME": "pretrain", "JOB_PARTITION": "gpu", "JOB_ACCOUNT": "nlp", "JOB_USER": "alice"}


def gpus() -> list[Gpu]:
    """Return two GPUs; a hardware slowdown lowers the clock of the second GPU."""
    return [
        Gpu(
            f"GPU-{number}",
            f"00000000:{number}B:00.0",
            name="NVIDIA H100 80GB HBM3",
            power=sine(300, 600, 2),
            module_power=sine(350, 680, 2),
            memory_power=flat(40),
            memory=flat((40 + number) * GIB),
            memory_reserved=GIB,
            throttle=8 * number,
            gpm=1,
            sm_activity=flat(0.8),
            tensor_activity=flat(0.4),
            dram_activity=flat(0.3),
            power_profiles=1 << 20,
        )
        for number in range(2)
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        library = nvml_library.build(folder)
        assert library is not None, "a C compiler is needed"
        trace = Trace(library, folder / "trace")
        trace.write(*gpus(), driver="570.86.15")
        code = folder / "code"
        code.mkdir()
        shutil.copy(TESTS / "scripts/complete_loop.py", code / "train.py")
        git = ["git", "-c", "user.name=alice", "-c", "user.email=alice@example.com"]
        for words in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "Train"]):
            subprocess.run([*git, *words], cwd=code, check=True)
        environ = os.environ | trace.environment() | {"OMP_NUM_THREADS": "1", "USER": "alice"}
        environ |= {f"EFFICIENTLLM_{name}": value for name, value in SETTINGS.items()}
        environ |= {f"SLURM_{name}": value for name, value in SLURM.items()}
        environ |= {"EFFICIENTLLM_RUN_DIR": str(folder / "runs")}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
        subprocess.run([*launcher, "--nproc_per_node", "2", "train.py"], cwd=code, env=environ, check=True)
        target = TESTS / "golden" / NAME
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path in (folder / "runs" / NAME).iterdir():
            (target / path.name).write_text(path.read_text().replace(str(folder / "runs"), "/data/runs"))


if __name__ == "__main__":
    main()
