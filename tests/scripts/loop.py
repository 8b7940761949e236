"""A training loop without torch; it can end in several ways after a given iteration."""

import argparse
import json
import os
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path

import effllm.efficientllm_metrics as effllm
from effllm.trainer import session

session.READY_S = 60.0  # long timeout: the first window must have a device, even on a busy machine

ENDS = {
    "raise": lambda: 1 / 0,
    "exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "leave": lambda: os._exit(4),
}

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--step-s", type=float, default=0.01)
parser.add_argument("--wait-s", type=float, default=0.0, help="data wait before each step")
parser.add_argument("--tokens", type=int, default=100)
parser.add_argument("--samples", type=int, default=2)
parser.add_argument("--parameters", type=int, default=1000)
parser.add_argument("--until", type=Path, help="a file: after the iterations, continue until it exists")
parser.add_argument("--served", action="store_true", help="begin after the aggregator has opened the run folder")
parser.add_argument("--at", type=int, default=0, help="the iteration after which the loop ends as in --end")
parser.add_argument("--end", choices=ENDS)
parser.add_argument("--nan-from", type=int, default=0, help="the iteration from which the loss is NaN")
given = parser.parse_args()


def starved_s():
    """Return the seconds for which this thread was runnable and waited for a CPU; 0 if Linux does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    except OSError:
        return 0.0


effllm.initialize_efficientllm_metrics(given.parameters)
collector = effllm.get_metrics_collector()
threads = [thread.name for thread in threading.enumerate()]
steps, inner_s, logging_s, starved, values = [], [], [], [starved_s()], {}
until_s = time.monotonic() + 60
while given.served and not any(Path(os.environ["EFFICIENTLLM_RUN_DIR"]).glob("*/run.json")):
    assert time.monotonic() < until_s, "there is no run folder"
    time.sleep(0.02)
for iteration in count(1):
    if iteration > given.iterations and (not given.until or given.until.exists()):
        break
    time.sleep(given.wait_s)
    start = time.monotonic()
    collector.record_iteration_start()
    began_s = time.monotonic()
    time.sleep(given.step_s)
    inner_s.append(time.monotonic() - began_s)
    collector.record_iteration_end(given.tokens, given.samples)
    steps.append((start, time.monotonic()))
    is_nan = 0 < given.nan_from <= iteration
    values = collector.log_metrics(iteration, float("nan") if is_nan else 10 / iteration)
    logging_s.append(time.monotonic() - steps[-1][1])
    starved.append(starved_s())
    if iteration == given.at:
        ENDS[given.end]()
start = time.monotonic()
effllm.finalize_efficientllm_metrics()
truth = {"steps": steps, "logging_s": logging_s, "starved_s": starved, "threads": threads, "values": values}
truth |= {"inner_s": inner_s, "end_held_s": time.monotonic() - start - (starved_s() - starved[-1])}
Path("truth.json").write_text(json.dumps(truth))
