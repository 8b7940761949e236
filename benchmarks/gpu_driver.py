"""Calls of the driver at rest and under load, CUDA calls beside readings of agents, and the rate of matrix products."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.figure import Figure
from effllm.devices import Reader
from effllm.devices.known.hardware import peak_clock_hz, peak_flops_per_s
from effllm.sensor_profile.load import TorchLoad
from effllm.sensor_profile.nvml_facts import Facts

READS, READS_APART_S = 60, 0.05
LOAD_S = 25.0
#: Precision -> size of the square matrices, and the number of products between two synchronisations.
PRODUCTS = {"bf16": (8192, 20), "bf16, small": (2048, 400), "fp16": (8192, 20)}
PRODUCTS_S, SAMPLE_EVERY_S = 5.0, 0.5
ALLOCATIONS_S, ALLOCATED_BYTES, LAUNCHES = 2.0, 64 << 20, 20_000

#: A process that reads like an agent: it prints a line when it begins.  Arguments: the reading, and the share of time
#: in the driver.
READ_ALL_THE_TIME = """
import sys, time
from effllm.devices import Site, open_device
reader = open_device("nvml", Site())
read = getattr(reader, sys.argv[1])
print("ready", flush=True)
while True:
    began_s = time.monotonic()
    read()
    time.sleep(max((time.monotonic() - began_s) / float(sys.argv[2]), 0.002))
"""
#: Name -> the reading, its share of time, and the number of processes.
BESIDE = {
    "a calibration (2 %)": ("read_energy", 0.02, 1),
    "eight calibrations at once": ("read_energy", 0.02, 8),
    "eight agents at their budget (0.1 %)": ("read", 0.001, 8),
    "eight agents without a budget (25 %)": ("read_energy", 0.25, 8),
}


def calls(reader: Reader, facts: Facts | None, where: str) -> list[Figure]:
    """Time the agent's readings and the single calls; ``where`` is "at rest" or "under load"."""
    figures = [
        _times(f"{name}, {where}", [_seconds(read) for _ in _paced(READS)])
        for name, read in (
            ("full reading", reader.read),
            ("energy reading", getattr(reader, "read_energy", reader.read)),
        )
    ]
    for call in facts.call_durations() if facts else []:
        detail = {"worst_ms": 1e3 * call.worst_s, "calls": call.calls}
        figures.append(Figure(f"call: {call.name}, {where}", 1e3 * call.median_s, "ms", detail=detail))
    return figures


def calls_under_load(reader: Reader, facts: Facts | None, loader: TorchLoad) -> list[Figure]:
    loader.start_stretches([LOAD_S])
    time.sleep(0.5)
    return calls(reader, facts, "under load")


def products(reader: Reader) -> list[Figure]:
    """Multiply matrices, and compare the rate with the peak of the table and with the activity of tensor cores."""
    import torch

    name = reader.device.name
    figures = []
    for what, (size, number) in PRODUCTS.items():
        precision = what.partition(",")[0]
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        one, other = (torch.randn(size, size, device="cuda", dtype=kind) for _ in range(2))
        out = torch.empty_like(one)
        readings: list[dict[str, float]] = []

        def multiply(count: int, one: Any = one, other: Any = other, out: Any = out) -> None:
            for _ in range(count):
                torch.mm(one, other, out=out)
            torch.cuda.synchronize()

        multiply(number)
        reader.read()
        began_s = sampled_s = time.monotonic()
        done = 0
        while time.monotonic() - began_s < PRODUCTS_S:
            multiply(number)
            done += number
            if time.monotonic() - sampled_s > SAMPLE_EVERY_S:
                sampled_s = time.monotonic()
                readings.append(dict(reader.read()[0].gauges))
        flops_per_s = 2 * size**3 * done / (time.monotonic() - began_s)
        figures += _product_figures(what, flops_per_s, peak_flops_per_s(name, precision), peak_clock_hz(name), readings)
    return figures


def _product_figures(
    what: str, flops_per_s: float, peak: float | None, peak_hz: float | None, readings: Sequence[dict[str, float]]
) -> list[Figure]:
    detail = {"readings": len(readings)}
    figures = [Figure(f"matrix products, {what}", flops_per_s / 1e12, "TFLOP/s", detail=detail)]
    busy = [one for one in readings if "tensor_activity_ratio" in one and "sm_clock_hz" in one]
    if peak and peak_hz and busy:
        # The audit of a run compares its MFU with this product, per reading.
        active = float(np.mean([one["tensor_activity_ratio"] * one["sm_clock_hz"] for one in busy])) / peak_hz
        detail = {"mfu": flops_per_s / peak, "activity_x_clock": active, "readings_with_activity": len(busy)}
        figures.append(
            Figure(
                f"matrix products, {what}: MFU over tensor activity",
                flops_per_s / peak / active,
                "ratio",
                detail=detail,
            )
        )
    return figures


def contention() -> list[Figure]:
    """Time allocations and kernel launches alone, and while other processes read the GPU."""
    figures = _cuda_calls("alone")
    for name, (read, share, processes) in BESIDE.items():
        with _readers(read, share, processes):
            figures += _cuda_calls(f"beside {name}")
    return figures


@contextlib.contextmanager
def _readers(read: str, share: float, processes: int) -> Iterator[None]:
    command = [sys.executable, "-c", READ_ALL_THE_TIME, read, str(share)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for one in started:
            assert one.stdout is not None
            one.stdout.readline()
        yield
    finally:
        for one in started:
            one.kill()
            one.communicate()


def _cuda_calls(where: str) -> list[Figure]:
    import torch

    runtime = _runtime()
    pointer = ctypes.c_void_p()

    def allocate() -> None:
        runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(ALLOCATED_BYTES))
        runtime.cudaFree(pointer)

    number = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    until_s = time.monotonic() + ALLOCATIONS_S
    allocations = [_seconds(allocate) for _ in iter(lambda: time.monotonic() < until_s, False)]
    launches = [_seconds(lambda: number.add_(1)) for _ in range(LAUNCHES)]
    torch.cuda.synchronize()
    return [_times(f"cudaMalloc and cudaFree, {where}", allocations), _times(f"kernel launch, {where}", launches)]


def _runtime() -> Any:
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise RuntimeError("the CUDA runtime library was not found")


def _paced(count: int) -> Iterator[int]:
    for number in range(count):
        yield number
        time.sleep(READS_APART_S)


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _times(name: str, spent_s: Sequence[float]) -> Figure:
    median, tail, worst = (1e3 * float(np.quantile(spent_s, share)) for share in (0.5, 0.99, 1.0))
    return Figure(name, median, "ms", detail={"p99_ms": tail, "worst_ms": worst, "calls": len(spent_s)})
