"""The NVML library of the tests: builds the library, writes its trace file, and computes the correct values.

`build` compiles ``tests/nvml``; the first comment of ``libnvidia-ml.c`` explains traces and faults. A process with the
variables of `Trace.environment` loads that library through the real pynvml. `RemoteReader` reads one device in another
process.
"""

from __future__ import annotations

import base64
import functools
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from effllm.devices import Site
from effllm.records.rank import Device, Sample

SOURCES = Path(__file__).parent / "nvml"
GIB = 2**30
ORIGIN_AGO_S = 60.0  # time since the counter was 0, for curves without a formula for their energy


def build(folder: Path) -> Path | None:
    """Compile the library into ``folder`` and return the folder; without a C compiler, return ``None``."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "libnvidia-ml.so.1"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    # No fused operations: the results must be equal to Python's results to the last bit.
    flags = ["-std=gnu11", *warnings, "-O1", "-ffp-contract=off", "-fPIC", "-shared", f"-Wl,-soname,{library.name}"]
    built = subprocess.run(
        [compiler, *flags, "-o", str(library), *sorted(map(str, SOURCES.glob("*.c"))), "-lm", "-pthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@functools.lru_cache(maxsize=2**18)
def _draw32(seed: int, number: int) -> int:
    return _splitmix64((_splitmix64(seed) + number) % 2**64) >> 32


def _draw(seed: int, number: int) -> float:
    return _draw32(seed, number) / 2**32


@dataclass(frozen=True)
class Curve:
    """A function of the monotonic clock, and its integral; the operations are the same as in nvml/curves.c."""

    shape: str
    low: float
    high: float = 0.0
    period_s: float = 0.0
    duty: float = 0.0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.shape}:{self.low!r}:{self.high!r}:{self.period_s!r}:{self.duty!r}:{self.seed}"

    def at(self, t: float) -> float:
        if self.shape == "flat":
            return self.low
        if self.shape == "sine":
            return (self.low + self.high) / 2 + (self.high - self.low) / 2 * math.sin(2 * math.pi * t / self.period_s)
        number, rest = divmod(t, self.period_s)
        if self.shape == "steps":
            return self.low + (self.high - self.low) * _draw(self.seed, int(number))
        if self.shape == "bursts":
            rest -= self._burst_start(number)
        return self.high if 0 <= rest < self.duty * self.period_s else self.low

    def integral(self, t0: float, t1: float) -> float:
        if self.shape != "steps":
            return self._since_zero(t1) - self._since_zero(t0)
        (first, rest0), (last, rest1) = divmod(t0, self.period_s), divmod(t1, self.period_s)
        lowest, highest = sorted((int(first), int(last)))
        draws = sum(_draw32(self.seed, number) for number in range(lowest, highest))
        share_s = self.period_s * ((draws if first <= last else -draws) / 2**32)
        share_s = share_s + rest1 * _draw(self.seed, int(last)) - rest0 * _draw(self.seed, int(first))
        return self.low * (t1 - t0) + (self.high - self.low) * share_s

    def mean(self, t0: float, t1: float) -> float:
        return self.integral(t0, t1) / (t1 - t0) if t0 < t1 else self.at(t1)

    def _burst_start(self, number: float) -> float:
        return _draw(self.seed, int(number)) * (1 - self.duty) * self.period_s

    def _since_zero(self, t: float) -> float:
        if self.shape == "flat":
            return self.low * t
        if self.shape == "sine":
            turn = 2 * math.pi / self.period_s
            return (self.low + self.high) / 2 * t + (self.high - self.low) / 2 * (1 - math.cos(turn * t)) / turn
        whole, rest = divmod(t, self.period_s)
        if self.shape == "bursts":
            rest = max(0.0, rest - self._burst_start(whole))
        high_s = whole * self.duty * self.period_s + min(rest, self.duty * self.period_s)
        return self.high * high_s + self.low * (t - high_s)


def flat(value: float) -> Curve:
    """Return a constant curve."""
    return Curve("flat", value)


def square(low: float, high: float, period_s: float, duty: float = 0.5) -> Curve:
    """Return a square wave; each period begins with the high level."""
    return Curve("square", low, high, period_s, duty)


def sine(low: float, high: float, period_s: float) -> Curve:
    """Return a sine wave; each period begins with a rise."""
    return Curve("sine", low, high, period_s)


def bursts(low: float, high: float, period_s: float, duty: float = 0.5, seed: int = 0) -> Curve:
    """Return a wave with one burst at a random time of each period: the energy of all periods is the same."""
    return Curve("bursts", low, high, period_s, duty, seed)


def steps(low: float, high: float, period_s: float, seed: int = 0) -> Curve:
    """Return a curve with a random level in each period."""
    return Curve("steps", low, high, period_s, seed=seed)


@dataclass(frozen=True)
class Gpu:
    """A device of a trace; with ``parent``, a MIG slice of the device at that position.

    The fields are the keys of the trace file; nvml/libnvidia-ml.c explains them. A field with ``None`` is not in the
    file, and NVML returns "not supported" for it.
    """

    uuid: str
    bus: str = ""
    name: str = "Traced"
    power: Curve = Curve("flat", 300.0)
    memory: Curve = Curve("flat", 40.0 * GIB)
    utilization: Curve = Curve("flat", 0.5)
    memory_total: int = 80 * GIB
    power_limit_w: float = 700.0
    tick_s: float = 0.0
    unsupported: tuple[str, ...] = ()
    parent: int | None = None
    # sensors of power and energy
    tick_phase_s: float = 0.0
    tick_jitter_s: float = 0.0
    duty_s: float = 0.0
    lag_s: float = 0.0
    gain: float = 1.0
    origin_s: float | None = None  # None: `Trace.write` sets the time
    power_mode: str = "exact"
    power_usage: str = "instant"
    average_s: float = 1.0
    energy_scope: str = "gpu"
    module_power: Curve | None = None
    memory_power: Curve | None = None
    power_limit_default_w: float | None = None
    sm_clock_max_mhz: float | None = 1980.0
    power_profiles: int | None = None
    # its other measurements
    memory_reserved: int = 0
    sm_clock_mhz: Curve | None = Curve("flat", 1980.0)
    memory_clock_mhz: Curve | None = Curve("flat", 2619.0)
    temperature_c: Curve | None = Curve("flat", 50.0)
    throttle: int = 0
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    processes: int = 0
    pcie_width: int = 0
    pcie_width_max: int = 0
    pcie_generation: int = 0
    nvlinks: int = 0
    nvlink_errors: int = 0
    gpm: int = 0
    sm_activity: Curve | None = None
    sm_occupancy: Curve | None = None
    tensor_activity: Curve | None = None
    dram_activity: Curve | None = None
    # what it is
    architecture: int = 9
    brand: int = 14
    serial: str | None = None
    module_id: int | None = None
    minor: int | None = None
    # the identity of a slice
    instance: int | None = None
    compute_instance: int = 0
    slices: int | None = None
    compute_slices: int | None = None
    multiprocessors: int | None = None

    def energy_j(self, t0: float, t1: float) -> float:
        """Return the energy between two monotonic times."""
        return self.power.integral(t0, t1)

    def counter_j(self, t: float, *, reset_s: float | None = None) -> float:
        """Return the energy counter at ``t``; some counters need the origin that `Trace.write` sets in its results."""
        origin_s = self.origin_s or 0.0
        assert not self._is_summed() or self.origin_s is not None, (
            "this counter has no origin: use the device that Trace.write returns"
        )
        curve, late = self._counted, t - self.lag_s
        begin_s = origin_s if reset_s is None else reset_s
        if not self.tick_s:
            joules = curve.integral(begin_s, late)
        elif not self.duty_s:
            joules = curve.integral(begin_s, self.tick_moment_s(self.last_tick(late)))
        else:
            joules = self._measured_j(self.last_tick(late))
            if reset_s is not None:
                joules -= self._measured_j(self.last_tick(reset_s))
        return max(0.0, self.gain * joules)

    def power_w(self, t: float, kind: str = "instant", scope: str = "gpu") -> float | None:
        """Return the value of a power sensor at ``t``, or ``None`` if the device has no such sensor."""
        curve = {"gpu": self.power, "module": self.module_power, "memory": self.memory_power}[scope]
        if curve is None or (scope, kind) == ("memory", "instant"):
            return None
        if self.power_mode == "exact" or not self.tick_s:
            return self.gain * (curve.at(t) if kind == "instant" else curve.mean(t - self.average_s, t))
        tick = self.last_tick(t)
        end_s, start_s = self.tick_moment_s(tick), self.tick_moment_s(tick - 1)
        if kind == "average":
            start_s = end_s - self.average_s
        elif self.duty_s:
            start_s = end_s - self.duty_s
        return self.gain * curve.mean(start_s, end_s)

    def last_tick(self, t: float) -> int:
        """Return the number of the sensor's last tick before or at ``t``."""
        tick = math.floor((t - self.tick_phase_s) / self.tick_s) + 1
        while self.tick_moment_s(tick) > t:
            tick -= 1
        return tick

    def tick_moment_s(self, tick: int) -> float:
        """Return the time of the sensor's tick with that number."""
        moment_s = self.tick_phase_s + tick * self.tick_s
        if self.tick_jitter_s:
            moment_s += self.tick_jitter_s * (2 * _draw(_fnv1a(self.uuid), tick) - 1)
        return moment_s

    def line(self) -> str:
        """Return the line of the device in the trace file."""
        named = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        named["unsupported"] = ",".join(self.unsupported)
        words = [f"{name}={value}".replace(" ", "%20") for name, value in named.items() if value is not None]
        return " ".join(["device" if self.parent is None else "slice", *words])

    @property
    def _counted(self) -> Curve:
        if self.energy_scope == "gpu":
            return self.power
        assert self.module_power is not None
        return self.module_power

    def _is_summed(self) -> bool:
        return bool(self.duty_s) or "steps" in {curve.shape for curve in (self.power, self.module_power) if curve}

    def _measured_j(self, tick: int) -> float:
        assert self.origin_s is not None
        first, sums = self.last_tick(self.origin_s), _sums(self)
        while first + len(sums) <= tick:
            end_s = self.tick_moment_s(first + len(sums))
            length_s = end_s - self.tick_moment_s(first + len(sums) - 1)
            sums.append(sums[-1] + self._counted.mean(end_s - self.duty_s, end_s) * length_s)
        return sums[max(0, tick - first)]

    def traced(self) -> Gpu:
        """Return the device; if its counter needs an origin, set it to `ORIGIN_AGO_S` before now."""
        if self.origin_s is not None or not self._is_summed():
            return self
        return replace(self, origin_s=time.monotonic() - ORIGIN_AGO_S)


@functools.lru_cache
def _sums(gpu: Gpu) -> list[float]:
    """Return the device's list of energy sums, to which `_measured_j` appends."""
    return [0.0]


@functools.lru_cache
def _fnv1a(text: str) -> int:
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


@dataclass
class Trace:
    """A trace file, with a file of faults and a file of counted calls next to it."""

    library: Path
    path: Path
    gpus: list[Gpu] = field(default_factory=list)

    def write(self, *gpus: Gpu, driver: str = "570.0") -> list[Gpu]:
        """Replace all devices; return the new devices with the origins of their counters."""
        self.gpus = [gpu.traced() for gpu in gpus]
        self.path.write_text(f"system driver={driver}\n" + "".join(gpu.line() + "\n" for gpu in self.gpus))
        return self.gpus

    def fault(self, *lines: str) -> None:
        """Replace all faults, immediately for every process that uses the trace; without lines there are no faults."""
        faults = Path(f"{self.path}.faults")
        draft = faults.with_suffix(".draft")
        draft.write_text("".join(line + "\n" for line in lines))
        draft.replace(faults)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a process whose pynvml reads the trace."""
        others = os.environ.get("LD_LIBRARY_PATH", "")
        return {
            "LD_LIBRARY_PATH": f"{self.library}:{others}" if others else str(self.library),
            "NVML_TRACE": str(self.path),
            **({"NVML_TRACE_CALLS": str(self._calls)} if self._calls.exists() else {}),
        }

    def count_calls(self) -> None:
        """Set the number of counted calls to zero; calls are counted in processes whose `environment` is made later."""
        self._calls.write_text("")

    def call_count(self, pid: int | None = None) -> Counter[str]:
        """Return the number of calls of each NVML function, by all processes or by one process."""
        calls = [line.split() for line in self._calls.read_text().splitlines()]
        return Counter(function for caller, function in calls if pid in (None, int(caller)))

    @property
    def _calls(self) -> Path:
        return Path(f"{self.path}.calls")

    @contextmanager
    def reader(self, site: Site) -> Iterator[RemoteReader]:
        """Open the device of ``site`` in another process.

        Raises:
            DeviceUnavailable: as `effllm.devices.nvml.open_device` does.
        """
        command = [sys.executable, str(Path(__file__).resolve())]
        environ = os.environ | self.environment()
        with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            remote = RemoteReader(process)
            try:
                remote.open(site)
                yield remote
            finally:
                process.stdin.close()  # this ends the process; the `with` block waits for its end


class RemoteReader:
    """A reader of ``effllm/devices/nvml.py`` in another process; its results are returned without changes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.device = Device(key="", kind="nvml")

    def open(self, site: Site) -> None:
        self.device = self._ask("open", site)

    def read(self) -> tuple[Sample, dict[str, str]]:
        return self._ask("call", "read")

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the reader in its process; raise the exceptions of this call in the test."""
        return self._ask("call", method, *arguments)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock of the reader, but not the clock of the trace."""
        self._ask("pass", seconds)

    def close_device(self) -> None:
        """Close the device, but not the process."""
        self._ask("call", "close")

    def _ask(self, *command: Any) -> Any:
        self._process.stdin.write(_line(command))
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that reads the device has ended"
        value, error = _object(answer)
        if error:
            raise error
        return value


def _line(value: Any) -> bytes:
    return base64.b64encode(pickle.dumps(value)) + b"\n"


def _object(line: bytes) -> Any:
    return pickle.loads(base64.b64decode(line))


def _serve() -> None:
    from effllm.devices import nvml

    ahead_s, reader = 0.0, None

    def answer(command: str, *arguments: Any) -> Any:
        nonlocal ahead_s, reader
        if command == "open":
            reader = nvml.open_device(*arguments, clock=lambda: time.monotonic() + ahead_s)
            return reader.device
        if command == "pass":
            ahead_s += arguments[0]
            return None
        return getattr(reader, arguments[0])(*arguments[1:])

    for line in sys.stdin.buffer:
        try:
            said = _line((answer(*_object(line)), None))
        except Exception as error:  # noqa: BLE001 - the one who asked gets it
            said = _line((None, error))
        sys.stdout.buffer.write(said)
        sys.stdout.buffer.flush()
    if reader:
        reader.close()


if __name__ == "__main__":
    _serve()
