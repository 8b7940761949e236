"""CPU time per tick of effllm's sampler, divided by the CPU time of a bare loop; CPU time per tick of other tools.

The bare loop repeats the recorded NVML calls of a reader through ctypes, with the same arguments and pauses: the lower
bound for a sampler in Python.  Sampler and bare loop alternate in one process, on a traced GPU.  The first measurement
uses calls of a few microseconds, shorter than any driver's calls: the worst case.  The second measurement uses
the durations that calls had on a real board.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml

from benchmarks.figure import Figure, interval_95, median
from effllm.agent import sampler as agent_sampler
from effllm.agent.sampler import Sampler
from effllm.devices import Reader, Site, open_device
from tests.nvml_library import Gpu, Trace, build, flat, square

ROOT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PEERS = ("nvitop", "zeus")
INTERVAL_S = 0.02
ROUNDS, TICKS = 15, 60
#: Reported durations of driver calls in s: INSTANT power, memory, utilization. Reads of energy counters took 2.4 ms.
#: https://github.com/flightlessmango/MangoHud/pull/2104
DRIVER_CALLS_S = {"fields": 170e-6, "memory": 12e-6, "utilization": 2.5e-6}

Calls = Sequence[tuple[Callable[..., int], tuple[Any, ...]]]


def measure() -> list[Figure]:
    """Measure the sampler and the bare loop in turns in one process, then the other tools if they are installed."""
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        if library is None:
            return []
        trace = Trace(library, Path(folder) / "trace")
        trace.write(_gpu())
        environ = os.environ | trace.environment() | {"HOME": folder}
        command = [sys.executable, "-m", "benchmarks.sampling"]
        ours = _answer(command, environ)
        peers = {name: _peer(name, environ) for name in PEERS if PEERS_PYTHON.exists()}
        trace.fault(*(f"0 {call} spin {took_s}" for call, took_s in DRIVER_CALLS_S.items()))
        as_driver = _answer(command, environ)
    figures = [
        Figure("sampler: CPU of a tick", median(ours["sampler"]), "us", detail=_detail(ours)),
        _ratio("the same, over the bare calls of NVML", ours),
        _ratio("the same, where calls take as long as a driver's", as_driver),
    ]
    bare_us = median(ours["bare"])
    for name, answer in peers.items():
        figures.append(Figure(f"{answer['what']}: CPU of a tick", answer["cpu_us"], "us", detail=answer))
        figures.append(Figure(f"{name}: the same, over our bare calls", answer["cpu_us"] / bare_us, "ratio"))
    return figures


def _ratio(name: str, ours: dict[str, Any]) -> Figure:
    ratios = [sampler / bare for sampler, bare in zip(ours["sampler"], ours["bare"], strict=True)]
    detail = {"bare_us": median(ours["bare"]), "rounds": ROUNDS, "ticks_a_side": TICKS, "interval_s": INTERVAL_S}
    interval = interval_95(ratios, median)
    return Figure(name, median(ratios), "ratio", goal=1.5, interval=interval, detail=detail)


def _gpu() -> Gpu:
    activities = dict.fromkeys(("sm_activity", "tensor_activity", "dram_activity"), flat(0.5))
    return Gpu(
        "GPU-0",
        "00000000:01:00.0",
        "NVIDIA H100 80GB HBM3",
        power=square(100.0, 500.0, 2.0),
        tick_s=0.1,
        duty_s=0.025,
        power_mode="held",
        power_usage="average",
        gpm=1,
        **activities,
    )


def _detail(ours: dict[str, Any]) -> dict[str, Any]:
    return {
        "reader_cpu_us": median(ours["reader"]),
        "reader_wall_us": median(ours["reader_wall"]),
        "bare_wall_us": median(ours["bare_wall"]),
        "calls_a_tick": ours["calls"],
    }


def _peer(name: str, environ: dict[str, str]) -> dict[str, Any]:
    return _answer([str(PEERS_PYTHON), "-m", f"benchmarks.peers.sampling_{name}", str(INTERVAL_S)], environ)


def _answer(command: Sequence[str], environ: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# --- the process that has the traced GPU ---------------------------------------------------------


class _Recorder:
    """Wraps pynvml's library, and records all calls with their arguments."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.calls: list[tuple[Callable[..., int], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> int:
            self.calls.append((function, arguments))
            code: int = function(*arguments)
            return code

        return call


@contextmanager
def _recorded() -> Iterator[_Recorder]:
    pynvml.nvmlInit()
    recorder = _Recorder(pynvml.nvmlLib)
    pynvml.nvmlLib, library = recorder, pynvml.nvmlLib
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield recorder
    finally:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()


def _open() -> Reader:
    return open_device("nvml", Site())


def _record() -> tuple[Reader, list[Calls]]:
    """Return the calls of each tick of a round, and the reader with the handles in these calls."""
    ticks: list[Calls] = []
    with _recorded() as recorder:
        reader = _open()
        for _ in range(TICKS):
            recorder.calls = []
            reader.read()
            ticks.append(recorder.calls)
            time.sleep(INTERVAL_S)
    return reader, ticks


def _paced(ticks: Iterator[Any], work: Callable[[Any], None]) -> tuple[float, float]:
    """Run the work of each tick at its time; return CPU time (sleeps included) and wall time per tick in us."""
    began_ns, next_s, wall_ns, count = time.thread_time_ns(), time.monotonic(), 0, 0
    for tick in ticks:
        start_ns = time.monotonic_ns()
        work(tick)
        wall_ns += time.monotonic_ns() - start_ns
        count += 1
        next_s += INTERVAL_S
        time.sleep(max(next_s - time.monotonic(), 0.0))
    return (time.thread_time_ns() - began_ns) / count / 1e3, wall_ns / count / 1e3


def _play(calls: Calls) -> None:
    for function, arguments in calls:
        function(*arguments)


def _sampler_cpu_us() -> float:
    """Return the CPU time per tick of the sampler's thread, in us."""
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    sampler = Sampler(_open, INTERVAL_S, lambda event: print(event.text, file=sys.stderr), wake)
    sampler.start()
    time.sleep(5 * INTERVAL_S)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "sampler")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    sampler.take_samples()
    began_ns = time.clock_gettime_ns(clock)
    time.sleep(TICKS * INTERVAL_S)
    spent_ns = time.clock_gettime_ns(clock) - began_ns
    count = len(sampler.take_samples())
    sampler.stop(1.0)
    os.close(wake)
    assert 0.9 * TICKS < count < 1.1 * TICKS, f"{count} ticks instead of {TICKS}"
    return spent_ns / count / 1e3


def main() -> None:
    """Measure in turns, and print the result of each round."""
    agent_sampler.FULL_SHARE = 1.0  # with ticks of 20 ms, the budget of a job would allow fewer readings
    recorded, ticks = _record()
    reader = _open()
    rounds: dict[str, list[float]] = {name: [] for name in ("bare", "bare_wall", "reader", "reader_wall", "sampler")}
    for _ in range(ROUNDS):
        cpu_us, wall_us = _paced(iter(ticks), _play)
        rounds["bare"].append(cpu_us)
        rounds["bare_wall"].append(wall_us)
        rounds["sampler"].append(_sampler_cpu_us())
        cpu_us, wall_us = _paced(iter(range(TICKS)), lambda _: reader.read())
        rounds["reader"].append(cpu_us)
        rounds["reader_wall"].append(wall_us)
    calls = sum(map(len, ticks)) / len(ticks)
    recorded.close()
    print(json.dumps({**rounds, "calls": calls}))


if __name__ == "__main__":
    main()
