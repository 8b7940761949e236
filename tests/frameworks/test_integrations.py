"""The examples in integration/ that use transformers, started with the commands of their READMEs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from systems import RAN

pytest.importorskip("transformers", reason="needs transformers")

INTEGRATION = Path(__file__).parents[2] / "integration"
needs_llama_factory = pytest.mark.skipif(
    importlib.util.find_spec("llamafactory") is None, reason="llamafactory is not installed"
)


def run(launch, command, **settings):
    """Run a command and return its finished job."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environ = launch.environ({"attach": "1", **settings}, PATH=path, HF_HUB_OFFLINE="1", PYTHON=sys.executable)
    return launch._job().start(command, environ).done(within_s=110.0)


def torchrun(script):
    options = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", "2"]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(script)]


@pytest.mark.system("transformers", how=RAN)
def test_transformers_sft(launch):
    job = run(launch, torchrun(INTEGRATION / "transformers_sft" / "train.py"))

    summary = job.ledger.summary
    assert (summary.status, summary.iterations, summary.parameters) == ("completed", 40, 859_776)
    assert [block["iteration"] for block in job.blocks] == ["10", "20", "30", "40"]
    assert {"evaluation", "checkpoint"} <= set(summary.time_by_class)
    assert not job.our_errors


@pytest.mark.system("trl", how=RAN)
def test_trl_grpo(launch):
    pytest.importorskip("trl", reason="needs TRL")

    job = run(launch, torchrun(INTEGRATION / "trl_grpo" / "train.py"))

    summary = job.ledger.summary
    # 30 steps of 8 completions on each of the 2 ranks
    assert (summary.status, summary.iterations, summary.samples) == ("completed", 30, 480)
    assert summary.time_by_class["generation"] > 0
    assert "IT (Tokens/Sec)" in job.stdout


@needs_llama_factory
@pytest.mark.system("llama-factory", how=RAN)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_llama_factory(launch, method, ranks):
    """LLaMA-Factory's command line starts torchrun; the training has the sizes of the YAML file."""
    job = run(launch, [str(INTEGRATION / "llama_factory" / "run.sh"), method, str(ranks)])

    summary = job.ledger.summary
    accumulated = 4 if method == "lora" else 2
    assert (summary.status, summary.iterations) == ("completed", 40)
    # the last step of an epoch may have fewer samples
    assert 0.95 * 40 * 2 * accumulated * ranks <= summary.samples <= 40 * 2 * accumulated * ranks
    # LoRA of rank 8 on all seven matrices of each of 4 layers: 4 x 8 x (4 x 256 + 3 x 512) parameters
    assert summary.parameters == 931_200 + (4 * 8 * (4 * 256 + 3 * 512) if method == "lora" else 0)
    assert job.ledger.facts["trainer"] == "CustomSeq2SeqTrainer"
    events = b"".join(path.read_bytes() for path in job.folder.rglob("*_sft/**/events*"))
    # By transformers' own logs, of the training process; effllm's event files are in the run folder.
    assert b"tokens_per_second_per_gpu" in events


@pytest.mark.system("transformers", how=RAN)
def test_energy_callback(launch):
    script = INTEGRATION / "energy_callback" / "train.py"
    job = run(launch, [sys.executable, str(script)], collection_interval=0.2)
    (summary,) = (job.folder / "out" / "energy_callback" / "results").glob("energy_monitoring_summary_*.json")
    written = json.loads(summary.read_text())

    assert (job.ledger.summary.status, job.ledger.summary.iterations) == ("completed", 40)
    assert written["steps"] == 40
    # All devices of these tests are simulated, with a power of 250 to 650 W.
    assert 250 < written["energy_consumed_wh"] * 3600 / written["covered_s"] < 650
    assert "FINAL ENERGY REPORT:" in job.stdout
    assert not job.our_errors
