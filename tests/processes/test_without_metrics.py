"""A wrong setting that turns metrics off is reported again at the end of the job."""

import subprocess
import sys

import pytest

LOOP = """
import effllm
collector = effllm.initialize_efficientllm_metrics(1000)
collector.record_iteration_start()
collector.record_iteration_end(100, 1)
print("trained", file=sys.stderr, flush=True)
"""
ATTACHED = "from effllm.attach import autoload; autoload()  # as torch does\n"


def stderr_of(cli, code, **variables):
    """Run a script in a new process; return the lines of its stderr."""
    path = cli.script("import os, sys\n" + code)
    done = subprocess.run(
        [sys.executable, path], env=cli.environ(**variables), cwd=cli.folder,
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stderr.splitlines()


@pytest.mark.parametrize("name", ["METRICS_ENABLED", "ATTACH"])
def test_invalid_value_of_a_switch_variable_is_reported_at_the_end(cli, name):
    [last] = stderr_of(cli, ATTACHED, **{f"EFFICIENTLLM_{name}": "perhaps"})

    assert last.startswith(f"[EfficientLLM] this job ran without metrics: EFFICIENTLLM_{name}='perhaps'")


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        (ATTACHED, {}),
        (ATTACHED, {"EFFICIENTLLM_METRICS_ENABLED": "off", "EFFICIENTLLM_ATTACH": "perhaps"}),
        (ATTACHED, {"EFFICIENTLLM_ATTACH": "perhaps", "RANK": "1", "WORLD_SIZE": "2"}),
        (ATTACHED + "os.close(2)", {"EFFICIENTLLM_ATTACH": "perhaps"}),
        (ATTACHED + "sys.modules['torch.distributed.launcher'] = sys", {"EFFICIENTLLM_ATTACH": "perhaps"}),
        (ATTACHED + "if os.fork(): os.wait(); os._exit(0)", {"EFFICIENTLLM_ATTACH": "perhaps"}),
    ],
    ids=["right", "off", "rank 1", "no stderr", "launcher", "forked"],
)
def test_process_without_a_wrong_setting_prints_no_line(cli, code, variables):
    assert stderr_of(cli, code, **variables) == []


def test_metrics_that_the_loop_starts_are_not_reported_as_missing(cli):
    lines = stderr_of(cli, ATTACHED + LOOP, EFFICIENTLLM_ATTACH="perhaps", EFFICIENTLLM_SINKS="none")

    assert [line for line in lines if "ran without metrics" in line] == []
