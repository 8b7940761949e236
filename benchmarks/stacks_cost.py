"""What a recording of py-spy costs the process that is recorded: a loop of pure Python, recorded and not, in turn.

``python -m benchmarks.stacks_cost --pairs 300`` prints the ratio of the times of one unit of work with its 95 %
interval.  Both slices of a pair follow each other, in random order; nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from effllm.agent.host_stacks import RATE_HZ
from effllm.agent.proc import py_spy_path

LOOP = """
import sys, time
def work():
    total = {}
    for index in range(2000):
        total[index & 63] = total.get(index & 63, 0) + index * index % 7
    return total
for line in sys.stdin:
    wall, cpu, units = time.perf_counter(), time.thread_time(), 0
    until = wall + float(line)
    while time.perf_counter() < until:
        work(); units += 1
    print((time.perf_counter() - wall) / units, (time.thread_time() - cpu) / units, flush=True)
"""
STARTED_S = 0.4  # py-spy has read the libraries of the process


def main(pairs: int, slice_s: float, seed: int) -> None:
    order = random.Random(seed)
    ratios: list[tuple[float, float]] = []
    with subprocess.Popen([sys.executable, "-c", LOOP], stdin=-1, stdout=-1, text=True, bufsize=1) as loop:
        for pair in range(pairs):
            times = {is_recorded: _slice(loop, slice_s, is_recorded) for is_recorded in _either(order)}
            ratios.append((times[True][0] / times[False][0], times[True][1] / times[False][1]))
            if sys.stderr.isatty():
                print(f"\r{pair + 1} of {pairs} pairs", end="", file=sys.stderr)
        assert loop.stdin is not None
        loop.stdin.close()
    columns = zip(("wall", "cpu"), zip(*ratios, strict=True), strict=True)
    print(json.dumps({"pairs": pairs, "slice_s": slice_s, **{name: _interval(column) for name, column in columns}}))


def _either(order: random.Random) -> tuple[bool, bool]:
    first = order.random() < 0.5
    return first, not first


def _slice(loop: subprocess.Popen[str], slice_s: float, is_recorded: bool) -> tuple[float, float]:
    """Return wall time and CPU time of a unit of work in one slice."""
    assert loop.stdin is not None
    assert loop.stdout is not None
    recorder = None
    with tempfile.NamedTemporaryFile() as output:
        if is_recorded:
            options = ["--nonblocking", "--idle", "--rate", str(RATE_HZ), "--duration", "3600"]
            options += ["--format", "chrometrace", "--output", output.name, "--pid", str(loop.pid)]
            recorder = subprocess.Popen([py_spy_path(), "record", *options], stdout=-3, stderr=-3)
        time.sleep(STARTED_S)
        print(slice_s, file=loop.stdin, flush=True)
        wall, cpu = loop.stdout.readline().split()
        if recorder is not None:
            assert recorder.poll() is None, "py-spy has ended"
            recorder.kill()
            recorder.wait()
    return float(wall), float(cpu)


def _interval(ratios: Sequence[float]) -> dict[str, float]:
    """Return the geometric mean of ratios with its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.fmean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--slice", type=float, default=1.0, dest="slice_s", help="seconds of one slice (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
