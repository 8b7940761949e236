"""All measurements that need a GPU, in one command: ``python -m benchmarks.gpu --keep``, or ``make bench-gpu``.

The parts come in the order of what they could refute: the sensors (the report of ``effllm profile``) with the cost of
calls; the losses, times and MFU of a training with metrics and without; matrix products against the peak and the
activity of tensor cores; calls under load; CUDA graphs and profiled steps; CUDA calls beside readings; an agent on this
driver; window energies against the known energy of the load; pairs of iterations with metrics on and off; the counter
against integrated power under square waves; and the peaks of memory of up to forty models.  A part that fails, hangs or
has no time left is listed, and the figures so far are kept after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import asdict
from rich.console import Console

from benchmarks import agent, gpu_driver, gpu_training, training
from benchmarks.__main__ import RESULTS, table
from benchmarks.figure import Figure
from benchmarks.gpu_waves import waves
from benchmarks.gpu_windows import QUICK_WINDOWS, WINDOWS, windows
from benchmarks.machine import machine
from benchmarks.memory import on_gpu
from effllm import sensor_profile as profiling
from effllm.devices import DeviceUnavailable, Reader, Site, open_device
from effllm.devices.known.hardware import peak_flops_per_s
from effllm.sensor_profile.load import LoadUnavailable, TorchLoad
from effllm.sensor_profile.nvml_facts import Facts
from effllm.sensor_profile.record import SensorProfile

PROFILE_S, QUICK_PROFILE_S = 60.0, 10.0
#: Seconds for all parts: some machines are lent for ten minutes.
BUDGET_S = 480.0
#: Seconds for the forty models, whose number follows the time that is left.
MODEL_S = 10.0


def main() -> int:
    """Measure, and print a table; return 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="", help="GPU: index in bus order, or UUID (default: the first)")
    parser.add_argument("--load", default="", metavar="MODULE:NAME", help="program that loads the GPU (default: torch)")
    parser.add_argument("--quick", action="store_true", help="a few repetitions: too little for figures")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="time for all parts (default: %(default)g)")
    parser.add_argument("--keep", action="store_true", help="keep the figures in a file")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="the file's folder (default: benchmarks/results/)")
    given = parser.parse_args()
    try:
        reader = open_gpu(given.device)
    except DeviceUnavailable as error:
        print(f"benchmarks.gpu: there is no GPU here that could be measured: {error}", file=sys.stderr)
        return 2
    console = Console()
    bench = _Bench(reader, given.load, quick=given.quick, until_s=time.monotonic() + given.seconds)
    path = None
    try:
        for step in bench.steps():
            with console.status(f"measuring: {step.name}"):
                bench.run(step)
            path = _keep(bench, given.folder) if given.keep else None
    finally:
        with contextlib.suppress(Exception):  # a driver that hangs
            reader.close()
    console.print(table(bench.figures, "On this GPU"))
    for line in bench.left_out:
        console.print(f"Left out: {line}", highlight=False)
    if path is not None:
        console.print(f"kept in {path}", highlight=False)
    return 0


class _TimeIsUp(Exception):
    """A part has taken longer than the time that was left."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def end(*_: object) -> None:
        raise _TimeIsUp(f"it took longer than the {seconds:.0f} s that were left")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def open_gpu(which: str) -> Reader:
    """Open an NVIDIA or AMD GPU.

    Raises:
        DeviceUnavailable: there is no such GPU.
    """
    site = Site(visible_devices=which or os.environ.get("CUDA_VISIBLE_DEVICES"))
    try:
        return open_device("nvml", site)
    except DeviceUnavailable as error:
        try:
            return open_device("amd", site)
        except DeviceUnavailable:
            raise error from None


class _Step(NamedTuple):
    """A part, and the seconds that it needs."""

    name: str
    measure: Callable[[], None]
    needs_s: float
    quick_s: float
    needs_profile: bool = False


class _Bench:
    """The parts of the benchmark, and their results."""

    def __init__(self, reader: Reader, load: str, *, quick: bool, until_s: float) -> None:
        self.figures: list[Figure] = []
        self.left_out: list[str] = []
        self.profile: SensorProfile | None = None
        self.memory: list[dict[str, Any]] = []
        self.reader = reader
        self._is_brief = quick
        self._load, self._quick, self._until_s = load, quick, until_s

    def steps(self) -> list[_Step]:
        return [
            _Step("the sensors", self._sensors, 75.0, 20.0),
            _Step("losses and times of a training", self._losses, 100.0, 60.0),
            _Step("matrix products", self._products, 25.0, 25.0),
            _Step("calls under load", self._calls, 25.0, 25.0),
            _Step("CUDA graphs and profiled steps", self._graphs, 90.0, 90.0),
            _Step("CUDA calls beside readings", self._contention, 40.0, 40.0),
            _Step("an agent", self._agent, 75.0, 15.0),
            _Step("windows' energy against the load's", self._windows, 100.0, 30.0, needs_profile=True),
            _Step("training with metrics on against off", self._training, 110.0, 110.0),
            _Step("counter against power under square waves", self._waves, 162.0, 60.0, needs_profile=True),
            _Step("peaks of memory against effllm fit", self._memory, 4 * MODEL_S, 4 * MODEL_S),
        ]

    @property
    def left_s(self) -> float:
        return self._until_s - time.monotonic()

    def run(self, step: _Step) -> None:
        """Run a part in the time that is left; a failure is listed, and the next part follows."""
        if step.needs_profile and self.profile is None:
            self.left_out.append(f"{step.name}: the sensors were not measured")
            return
        self._is_brief = self._quick or self.left_s < step.needs_s
        if self.left_s < step.quick_s:
            self.left_out.append(f"{step.name}: {self.left_s:.0f} s were left, and it needs {step.quick_s:g} s")
            return
        try:
            with _limited(self.left_s):
                step.measure()
        except Exception as error:  # noqa: BLE001 - the figures of the other parts must not be lost
            self.left_out.append(f"{step.name}: {type(error).__name__}: {error}")

    def open_load(self) -> TorchLoad:
        """Open the program that loads the GPU.

        Raises:
            LoadUnavailable: no load is available.
        """
        if self._load:
            module, _, name = self._load.partition(":")
            made: TorchLoad = getattr(importlib.import_module(module), name)()
            return made
        load = TorchLoad(self.reader.device.key if self.reader.device.kind == "nvml" else None)
        try:
            return load.opened()
        except LoadUnavailable:
            load.close()
            raise

    def _sensors(self) -> None:
        facts = Facts(self.reader.device.key) if self.reader.device.kind == "nvml" else None
        seconds = QUICK_PROFILE_S if self._is_brief else PROFILE_S
        try:
            self.profile = found = profiling.profile(self.reader, self.open_load, seconds, facts=facts)
        finally:
            if facts is not None:
                facts.close()
        self.left_out += found.unmeasured
        sensor, how = found.sensor, "" if found.measured_lag else " (assumed)"
        self._figure("tick of the energy counter", sensor.tick_s, 1e3, "ms", sensor.tick_error_s)
        self._figure(f"lag of the energy counter{how}", sensor.lag_s, 1e3, "ms", sensor.lag_error_s)
        self._figure(f"share of each tick that is measured{how}", sensor.duty, 1.0, "ratio")
        if found.average_response is not None:
            width = found.average_response
            self._figure("window of averaged power", width.window_s, 1.0, "s", width.window_error_s)
        for call in found.calls:
            detail = {"worst_ms": 1e3 * call.worst_s, "calls": call.calls}
            self.figures.append(Figure(f"call: {call.name}", 1e3 * call.median_s, "ms", detail=detail))

    def _figure(self, name: str, value: float, factor: float, unit: str, error: float | None = None) -> None:
        interval = None if error is None else (factor * (value - error), factor * (value + error))
        self.figures.append(Figure(name, factor * value, unit, None, interval))

    def _under_load(self, what: str, measure: Callable[[TorchLoad], list[Figure]]) -> None:
        try:
            loader = self.open_load()
        except LoadUnavailable as error:
            self.left_out.append(f"{what}: {error}")
            return
        try:
            self.figures += measure(loader)
        except LoadUnavailable as error:
            self.left_out.append(f"{what}: {error}")
        finally:
            loader.close()

    def _waves(self) -> None:
        assert self.profile is not None
        found, cycles = self.profile, 3 if self._is_brief else 12
        self._under_load(
            "counter against power under square waves", lambda loader: waves(self.reader, loader, found, cycles)
        )

    def _windows(self) -> None:
        assert self.profile is not None
        sensor, counts = self.profile.sensor, QUICK_WINDOWS if self._is_brief else WINDOWS
        key = self.reader.device.key
        if self.reader.device.kind != "nvml":
            self.left_out.append("windows' energy against the load's: on NVIDIA's GPUs alone")
            return
        self._under_load("windows' energy against the load's", lambda loader: windows(key, loader, sensor, counts))

    def _losses(self) -> None:
        if self._has_cuda("losses and times of a training"):
            steps = gpu_training.QUICK_STEPS if self._is_brief else gpu_training.STEPS
            self.figures += gpu_training.measure(steps, peak_flops_per_s(self.reader.device.name))

    def _products(self) -> None:
        if self._has_cuda("matrix products"):
            self.figures += gpu_driver.products(self.reader)

    def _calls(self) -> None:
        facts = Facts(self.reader.device.key) if self.reader.device.kind == "nvml" else None
        try:
            self.figures += gpu_driver.calls(self.reader, None, "at rest")  # the sensors' part has the single calls
            self._under_load("calls under load", lambda loader: gpu_driver.calls_under_load(self.reader, facts, loader))
        finally:
            if facts is not None:
                facts.close()

    def _graphs(self) -> None:
        if self._has_cuda("CUDA graphs and profiled steps"):
            self.figures += gpu_training.graphs()
            self.figures += gpu_training.profiled()

    def _contention(self) -> None:
        if self._has_cuda("CUDA calls beside readings"):
            self.figures += gpu_driver.contention()

    def _has_cuda(self, what: str) -> bool:
        if why_not := training.lacks_cuda():
            self.left_out.append(f"{what}: {why_not}")
        return not why_not

    def _agent(self) -> None:
        self.figures += agent.measure(2.0, 5.0) if self._is_brief else agent.measure()

    def _training(self) -> None:
        why_not = training.lacks_on_gpu()
        if why_not:
            self.left_out.append(f"training with metrics on against off: {why_not}")
            return
        self.figures += training.measure_on_gpu()

    def _memory(self) -> None:
        if reason := on_gpu.why_not():
            self.left_out.append(f"peaks of memory against effllm fit: {reason}; python -m benchmarks.memory --gpu")
            return
        found = on_gpu.measure_all(4 if self._quick else min(int(self.left_s / MODEL_S), on_gpu.COUNT))
        self.figures += on_gpu.figures_of(found)
        self.memory = on_gpu.rows_of(found)


# --- the file ------------------------------------------------------------------------------------


def _keep(bench: _Bench, folder: Path) -> Path:
    device, found = bench.reader.device, bench.profile
    about = machine(
        gpu=device.name,
        driver=device.driver,
        power_limit_w=device.power_limit_w,
        torch=(found and found.load) or "none that can compute on this GPU",
    )
    body = {
        "machine": about,
        "figures": [figure.to_dict() for figure in bench.figures],
        "left_out": bench.left_out,
        "memory": bench.memory,
        "profile": msgspec.to_builtins(found) | {"sensor": asdict(found.sensor)} if found else None,
    }
    folder.mkdir(exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    path = folder / f"{about['date']}-gpu-{slug}.json"
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
