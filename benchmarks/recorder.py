"""The cost of the two calls in a training loop, divided by their lower bound: two clock reads and one pack."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace

import effllm
from benchmarks.figure import Figure, median
from effllm.records.ring import AFTER_STEPS, MEMORY, MEMORY_FIELDS, RingWriter
from effllm.trainer.declared import Declared
from effllm.trainer.rank_device import RankDevice
from effllm.trainer.watched_recorder import DeviceMemory

ROUNDS, CALLS = 40, 5000


def measure() -> list[Figure]:
    """Measure calls and lower bound in turns, with a running agent; the time of an empty call is subtracted."""
    fields = struct.Struct("<Qhhqqqqdqqqqqqqqq")
    memory = mmap.mmap(-1, 4096)
    pack, now = fields.pack_into, time.monotonic_ns
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EFFICIENTLLM_RUN_DIR"] = folder
        os.environ["EFFICIENTLLM_SINKS"] = "none"
        collector = effllm.initialize_efficientllm_metrics(1_000_000)

        def nothing() -> None:
            pass

        def bare() -> None:
            start, end = now(), now()
            pack(memory, 0, 1, 1, 0, 1, 1, start, end, 0.0, 1, 1, 1, 1, 1, 1, 1, 1, 1)

        def ours() -> None:
            collector.record_iteration_start()
            collector.record_iteration_end(4096, 2)

        costs: dict[Callable[[], None], list[float]] = {nothing: [], bare: [], ours: []}
        for _ in range(ROUNDS):
            for call, collected in costs.items():
                collected.append(_median_ns(call))
        effllm.finalize_efficientllm_metrics()
    read_ns = _reading_ns()
    overhead, bare_ns, ours_ns = (median(costs[call]) for call in (nothing, bare, ours))
    return [
        Figure("start and end of an iteration, in the training thread", (ours_ns - overhead) / 1000, "us", goal=2.0),
        Figure(
            "the same, over two clock reads and a pack",
            (ours_ns - overhead) / (bare_ns - overhead),
            "ratio",
            detail={"bare_us": (bare_ns - overhead) / 1000},
        ),
        Figure("reading torch's allocator, once a window, without torch's own call", read_ns / 1000, "us"),
    ]


def _reading_ns() -> float:
    """Return the time to read the allocator and to write a record, with a stand-in that has its answer ready."""
    size = {"all": {"current": 10**10, "peak": 10**10}}
    names = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
    stats = {**dict.fromkeys(names, size), "num_alloc_retries": 0, "num_ooms": 0}
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 0,
        is_current_stream_capturing=lambda: False,
        memory_stats_as_nested_dict=lambda: stats,
    )
    device = RankDevice(SimpleNamespace(cuda=cuda, _C=None), Declared())
    device.index = 0
    writer, memory = RingWriter(1000), DeviceMemory(cuda, device)
    indices = range(len(MEMORY_FIELDS))

    def read() -> None:
        if (values := memory.read_allocator()) is not None:
            writer.write_values(1, AFTER_STEPS, indices, values, MEMORY)

    spent = median([_median_ns(read) for _ in range(10)])
    writer.close()
    return spent


def _median_ns(call: Callable[[], None]) -> float:
    clock = time.perf_counter_ns
    spent = []
    for _ in range(CALLS):
        began = clock()
        call()
        spent.append(clock() - began)
    return median(spent)
