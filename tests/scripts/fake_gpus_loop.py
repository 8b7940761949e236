"""A loop on fake GPUs of torch, which are those of the simulated NVML; its current device is always GPU 0.

``--used 1,0``: GPUs of the models of the ranks.  ``--stray``: a context on GPU 0 before the metrics begin.  ``--late``:
the model is moved in iteration 25.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fake_cuda
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--uuids", required=True)
parser.add_argument("--used", required=True)
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--gpus", type=int, default=2)
parser.add_argument("--stray", action="store_true")
parser.add_argument("--late", action="store_true")
given = parser.parse_args()
fake_cuda.UUIDS = tuple(given.uuids.split(","))[: given.gpus]
fake = fake_cuda.FakeTorch(len(fake_cuda.UUIDS), (0,) if given.stray else ())
for name in dir(fake.cuda):
    if not name.startswith("_"):
        setattr(torch.cuda, name, getattr(fake.cuda, name))
torch._C._cuda_hasPrimaryContext = fake._C._cuda_hasPrimaryContext
torch.version.cuda = "13.0"
used = int(given.used.split(",")[int(os.environ["RANK"])])

import effllm.efficientllm_metrics as effllm  # noqa: E402

if not given.late:
    fake.cuda.allocate(used, 10**9)
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for iteration in range(1, given.iterations + 1):
    collector.record_iteration_start()
    time.sleep(0.02)
    if given.late and iteration == 25:
        fake.cuda.allocate(used, 10**9)
        collector.declared.set_parameter_devices(
            [SimpleNamespace(type="cuda", index=used)]
        )  # as a step of an optimizer does
    collector.record_iteration_end(100, 2)
    assert fake.cuda.current_device() == 0
effllm.finalize_efficientllm_metrics()
assert fake.cuda.contexts == {used} | ({0} if given.stray else set()), fake.cuda.contexts
