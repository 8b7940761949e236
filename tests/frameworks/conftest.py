"""Fixture for jobs with frameworks; each test contains a script, which imports the tiny model from `tiny`."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class Frameworks:
    """Starts scripts without any effllm code; only environment variables attach effllm."""

    def __init__(self, launch):
        self._launch = launch

    def run(self, code, *arguments, ranks=1, launcher=(), attach="1", environ=None, **settings):
        """Run a script and return its finished job."""
        job = self.start(code, *arguments, ranks=ranks, launcher=launcher, attach=attach, environ=environ, **settings)
        return job.done(within_s=100.0)

    def start(self, code, *arguments, ranks=1, launcher=(), attach="1", environ=None, **settings):
        """Start a script, with torchrun for several ranks or with the given launcher command."""
        job = self._launch._job()
        script = job.folder / "script.py"
        script.write_text(code)
        if ranks > 1 and not launcher:
            options = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", str(ranks)]
            launcher = [sys.executable, "-m", "torch.distributed.run", *options]
        more = {"PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
        more |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(job.folder / "hf"), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        chosen = {"attach": attach, "log_interval": 2, **settings}
        environment = self._launch.environ(chosen, **more, **(environ or {}))
        return job.start([*(launcher or [sys.executable]), str(script), *map(str, arguments)], environment)


@pytest.fixture
def frameworks(launch):
    """Return a launcher of scripts with frameworks."""
    return Frameworks(launch)
