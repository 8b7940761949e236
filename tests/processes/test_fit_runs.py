"""``effllm fit --runs`` reads the run folders of real jobs: recorder, agent, aggregator and store.

Torch's allocator is a stand-in of the test, because there is no GPU.
"""

import json
import shutil

import jobs
import pytest
from nvml_library import GIB, Gpu, Trace, flat
from typer.testing import CliRunner

from effllm.commands.app import app
from effllm.memory.config_json import read_config
from effllm.memory.estimate import estimate
from effllm.memory.plan import MemoryPlan

pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = jobs.needs_torch

FIELDS = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}
FIELDS |= {"intermediate_size": 128, "vocab_size": 1000}
PARAMETERS = 2 * 1000 * 64 + 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 64

#: A loop of the tiny model that states its plan, with a peak of torch's allocator.
TRAINING = """
import time
import torch

PEAK, LENGTH, PARAMETERS = {peak}, {length}, {parameters}
now = {{"current": PEAK // 2, "peak": PEAK // 2}}
torch.version.cuda = "13.0"
del torch.cuda.Event
for module in (torch.cuda, torch.cuda.memory):
    module.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.current_device = lambda: 0
torch._C._cuda_memoryStats = lambda _index: {{
    "allocated_bytes": {{"all": now}},
    "reserved_bytes": {{"all": {{"current": PEAK * 2, "peak": PEAK * 2}}}},
    "inactive_split_bytes": {{"all": {{"current": 0, "peak": 0}}}},
    "num_alloc_retries": 0,
    "num_ooms": 0,
}}
import effllm.efficientllm_metrics as effllm

effllm.initialize_efficientllm_metrics(PARAMETERS)
collector = effllm.get_metrics_collector()
plan = "precision=fp32 optimizer=adamw checkpointing=none micro_batch=1"
collector.record_facts(model="Tiny", memory_plan=f"{{plan}} seq_length={{LENGTH}}")
for _ in range(20):
    collector.record_iteration_start()
    time.sleep(0.005)
    now["peak"] = PEAK
    collector.record_iteration_end(LENGTH, 1)
effllm.finalize_efficientllm_metrics()
"""


def test_run_folders_of_jobs_correct_the_estimate(launch, library, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FIELDS))
    shape, plan = read_config(FIELDS), MemoryPlan(precision="fp32")
    trace = Trace(library, tmp_path / "trace")
    trace.write(Gpu("GPU-aaaa0001-0000-4000-8000-000000000001", "00000000:3B:00.0", memory=flat(8.0 * GIB)))
    before = estimate(shape, plan)
    for length, ratio in ((256, 1.0), (512, 1.1), (1024, 1.21)):
        same = estimate(shape, MemoryPlan(precision="fp32", seq_length=length)).allocated.expected
        code = TRAINING.format(peak=round(same * ratio), length=length, parameters=PARAMETERS)
        runs = tmp_path / "runs"
        settings = {"device": "nvml", "log_interval": 2, "run_dir": str(runs), "ledger": tmp_path / "ledger"}
        job = launch.code(code, environ=trace.environment(), **settings).wait()
        assert job.code == 0, job.stderr

    command = ["fit", str(config), "--mode", "training", "--precision", "fp32", "--runs", str(runs), "--json"]
    command += ["--gpu", "h100-80gb"]
    [model] = json.loads(CliRunner().invoke(app, command).stdout)["models"]
    shutil.rmtree(runs)
    command[command.index(str(runs))] = str(tmp_path / "ledger")
    [of_ledger] = json.loads(CliRunner().invoke(app, command).stdout)["models"]

    assert model["parameters"] == PARAMETERS
    assert model["learned"]["left_out"] == {}
    assert model["learned"]["runs"] == 3
    assert model["learned"]["ratios"] == pytest.approx([1.0, 1.1, 1.21], rel=1e-4)
    expected = 1.1 * before.allocated.expected + before.total.expected - before.allocated.expected
    assert model["training"]["total"]["expected"] == pytest.approx(expected, rel=1e-4)
    assert of_ledger == model
