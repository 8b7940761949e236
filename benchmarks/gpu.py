"""All measurements that need a GPU, in one command: ``python -m benchmarks.gpu --keep``, or ``make bench-gpu``.

The first parts measure the sensors (the report of ``effllm profile``), compare the counter with integrated power under
square waves, and compare window energies with the known energy of the load.  Further parts measure the cost of calls
and of an agent on this driver, training with metrics on and off, and the peaks of memory of forty models.  Without
CUDA, the parts that need CUDA are skipped and listed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict
from rich.console import Console

from benchmarks import agent, training
from benchmarks.__main__ import RESULTS, table
from benchmarks.figure import Figure
from benchmarks.gpu_waves import waves
from benchmarks.gpu_windows import QUICK_WINDOWS, WINDOWS, windows
from benchmarks.machine import machine
from benchmarks.memory import on_gpu
from effllm import sensor_profile as profiling
from effllm.devices import DeviceUnavailable, Reader, Site, open_device
from effllm.sensor_profile.load import Loader, LoadUnavailable, TorchLoad
from effllm.sensor_profile.nvml_facts import Facts
from effllm.sensor_profile.record import SensorProfile

PROFILE_S, QUICK_PROFILE_S = 60.0, 10.0


def main() -> int:
    """Measure, and print a table; return 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="", help="GPU: index in bus order, or UUID (default: the first)")
    parser.add_argument("--load", default="", metavar="MODULE:NAME", help="program that loads the GPU (default: torch)")
    parser.add_argument("--quick", action="store_true", help="two minutes instead of ten: too little for figures")
    parser.add_argument("--keep", action="store_true", help="keep the figures in a file")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="the file's folder (default: benchmarks/results/)")
    given = parser.parse_args()
    try:
        reader = open_gpu(given.device)
    except DeviceUnavailable as error:
        print(f"benchmarks.gpu: there is no GPU here that could be measured: {error}", file=sys.stderr)
        return 2
    console = Console()
    bench = _Bench(reader, given.load, quick=given.quick)
    try:
        for name, step in bench.steps():
            with console.status(f"measuring: {name}"):
                step()
    finally:
        reader.close()
    console.print(table(bench.figures, "On this GPU"))
    for line in bench.left_out:
        console.print(f"Left out: {line}", highlight=False)
    if given.keep:
        console.print(f"kept in {_keep(bench, given.folder)}", highlight=False)
    return 0


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


class _Bench:
    """The parts of the benchmark, and their results."""

    def __init__(self, reader: Reader, load: str, *, quick: bool) -> None:
        self.figures: list[Figure] = []
        self.left_out: list[str] = []
        self.profile: SensorProfile | None = None
        self.memory: list[dict[str, Any]] = []
        self.reader = reader
        self._load, self._quick = load, quick

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        return [
            ("the sensors", self._sensors),
            ("the counter beside power", self._waves),
            ("windows", self._windows),
            ("an agent", self._agent),
            ("training", self._training),
            ("the memory of forty models", self._memory),
        ]

    def open_load(self) -> Loader:
        """Open the program that loads the GPU.

        Raises:
            LoadUnavailable: no load is available.
        """
        if self._load:
            module, _, name = self._load.partition(":")
            made: Loader = getattr(importlib.import_module(module), name)()
            return made
        load = TorchLoad(self.reader.device.key if self.reader.device.kind == "nvml" else None)
        try:
            return load.opened()
        except LoadUnavailable:
            load.close()
            raise

    def _sensors(self) -> None:
        facts = Facts(self.reader.device.key) if self.reader.device.kind == "nvml" else None
        seconds = QUICK_PROFILE_S if self._quick else PROFILE_S
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
        for name, ratio in found.ratios.items():
            interval = (ratio.low, ratio.high)
            self.figures.append(Figure(f"counter over integrated power, {name}", ratio.value, "ratio", None, interval))
        for call in found.calls:
            detail = {"worst_ms": 1e3 * call.worst_s, "calls": call.calls}
            self.figures.append(Figure(f"call: {call.name}", 1e3 * call.median_s, "ms", detail=detail))

    def _figure(self, name: str, value: float, factor: float, unit: str, error: float | None = None) -> None:
        interval = None if error is None else (factor * (value - error), factor * (value + error))
        self.figures.append(Figure(name, factor * value, unit, None, interval))

    def _under_load(self, what: str, measure: Callable[[Loader], list[Figure]]) -> None:
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
        found, cycles = self.profile, 3 if self._quick else 12
        self._under_load(
            "counter against power under square waves", lambda loader: waves(self.reader, loader, found, cycles)
        )

    def _windows(self) -> None:
        assert self.profile is not None
        sensor, counts = self.profile.sensor, QUICK_WINDOWS if self._quick else WINDOWS
        key = self.reader.device.key
        if self.reader.device.kind != "nvml":
            self.left_out.append("windows' energy against the load's: on NVIDIA's GPUs alone")
            return
        self._under_load("windows' energy against the load's", lambda loader: windows(key, loader, sensor, counts))

    def _agent(self) -> None:
        self.figures += agent.measure(2.0, 5.0) if self._quick else agent.measure()

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
        found = on_gpu.measure_all(4 if self._quick else on_gpu.COUNT)
        self.figures += on_gpu.figures_of(found)
        self.memory = on_gpu.rows_of(found)


# --- the file ------------------------------------------------------------------------------------


def _keep(bench: _Bench, folder: Path) -> Path:
    assert bench.profile is not None
    device, found = bench.reader.device, bench.profile
    about = machine(
        gpu=device.name,
        driver=device.driver,
        power_limit_w=device.power_limit_w,
        torch=found.load or "none that can compute on this GPU",
        **found.board.traits,
    )
    body = {
        "machine": about,
        "figures": [figure.to_dict() for figure in bench.figures],
        "left_out": bench.left_out,
        "memory": bench.memory,
        "profile": msgspec.to_builtins(found) | {"sensor": asdict(found.sensor)},
    }
    folder.mkdir(exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    path = folder / f"{about['date']}-gpu-{slug}.json"
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
