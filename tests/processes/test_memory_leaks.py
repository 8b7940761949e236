"""Memory of real processes: a leak of 1 MB per iteration is found, and fragmented memory is not reported as a leak."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cases import cases, repeats

#: A loop with a batch of varying sizes, freed in another order, and blocks that live for many iterations. A cache grows
#: to 100 to 350 MB in at most 100 iterations. Every written byte is in the memory of the process.
LOOP = """
import json, random, sys
from effllm.instruments.profiling import GPUMemoryProfiler

seed, iterations, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
chance = random.Random(seed)
profiler = GPUMemoryProfiler("cpu")
profiler.set_baseline()
blocks, cache, leaked, found = [], {}, [], []
keys = chance.choice((10, 20, 30, 60, 100))
size, is_random = chance.randrange(100_000_000, 350_000_000) // keys, keys <= 30 and chance.random() < 0.5

def batch():
    return [b"x" * int(chance.expovariate(1 / 200_000)) for _ in range(chance.randrange(5, 60))]

for iteration in range(iterations):
    work = batch()
    for _ in range(chance.randrange(6)):
        blocks.append(b"x" * (int(chance.lognormvariate(11, 2)) % 4_000_000))
    while sum(map(len, blocks)) > 30_000_000:
        blocks.pop(chance.randrange(len(blocks)))
    key = chance.randrange(keys) if is_random else iteration
    if key not in cache and len(cache) < keys:
        cache[key] = b"x" * size
    if kind == "one object":
        leaked.append(b"x" * 1_000_000)
    elif kind == "small objects":
        leaked.append([[number] for number in range(8_000)])  # about 120 bytes each
    while work:
        work.pop(chance.randrange(len(work)))
    profiler.measure("end")
    if iteration % 10 == 9 and profiler.detect_leak():
        found.append(iteration + 1)

print(json.dumps([found, profiler.get_summary()]))
"""


def ran(code, *arguments):
    """Return the iterations with a reported leak, and the summary of the profiler."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)


@cases("seed", range(repeats(1, 3)))
@cases("kind", ["one object", "small objects"])
def test_leak_of_1_mb_in_a_real_process_is_found_in_200_iterations(kind, seed):
    found, summary = ran(LOOP, seed, 200, kind)

    assert found
    assert summary["growth_gb_per_1000_iterations"] == pytest.approx(1.0, rel=0.35)


@cases("seed", range(repeats(2, 50)))
def test_fragmented_memory_of_a_real_process_is_no_leak(seed):
    found, summary = ran(LOOP, seed, 500, "none")

    assert found == []
    assert summary["peak_allocated_gb"] > 0.1  # more than the threshold of `detect_leak`
