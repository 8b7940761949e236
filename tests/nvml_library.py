"""The project's own NVML library for tests: builds it, writes its trace, and knows the truth of it.

`build` compiles ``tests/nvml/libnvidia-ml.c``.  A process with `Trace.environment` in its environment
loads that library through the real pynvml; `RemoteReader` is such a process around one open device.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from effllm.devices import DeviceUnavailable, Site
from effllm.schema import Device, Sample

SOURCE = Path(__file__).parent / "nvml" / "libnvidia-ml.c"
GIB = 2**30


def build(folder: Path) -> Path | None:
    """Compile the library into ``folder`` and return the folder, or ``None`` where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "libnvidia-ml.so.1"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{library.name}"]
    built = subprocess.run(
        [compiler, *flags, "-o", str(library), str(SOURCE), "-lm"], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return folder


@dataclass(frozen=True)
class Curve:
    """A known function of the monotonic clock, and its integral."""

    shape: str
    low: float
    high: float = 0.0
    period_s: float = 0.0
    duty: float = 0.0

    def __str__(self) -> str:
        return f"{self.shape}:{self.low!r}:{self.high!r}:{self.period_s!r}:{self.duty!r}"

    def at(self, t: float) -> float:
        """Return the value at ``t``."""
        if self.shape == "flat":
            return self.low
        if self.shape == "square":
            return self.high if t % self.period_s < self.duty * self.period_s else self.low
        return (self.low + self.high) / 2 + (self.high - self.low) / 2 * math.sin(2 * math.pi * t / self.period_s)

    def integral(self, t0: float, t1: float) -> float:
        """Return the integral from ``t0`` to ``t1``."""
        return self._since_zero(t1) - self._since_zero(t0)

    def _since_zero(self, t: float) -> float:
        if self.shape == "flat":
            return self.low * t
        if self.shape == "square":
            whole, rest = divmod(t, self.period_s)
            high_s = whole * self.duty * self.period_s + min(rest, self.duty * self.period_s)
            return self.high * high_s + self.low * (t - high_s)
        turn = 2 * math.pi / self.period_s
        return (self.low + self.high) / 2 * t + (self.high - self.low) / 2 * (1 - math.cos(turn * t)) / turn


def flat(value: float) -> Curve:
    """Return a curve that never changes."""
    return Curve("flat", value)


def square(low: float, high: float, period_s: float, duty: float = 0.5) -> Curve:
    """Return a square wave, high first."""
    return Curve("square", low, high, period_s, duty)


def sine(low: float, high: float, period_s: float) -> Curve:
    """Return a sine wave, upwards first."""
    return Curve("sine", low, high, period_s)


@dataclass(frozen=True)
class Gpu:
    """One traced device, or with ``parent`` a slice of the device at that position."""

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

    def energy_j(self, t0: float, t1: float) -> float:
        """Return the energy that flowed between two monotonic times."""
        return self.power.integral(t0, t1)

    def line(self) -> str:
        """Return the device as the trace has it."""
        kind = "device" if self.parent is None else f"slice parent={self.parent}"
        return (
            f"{kind} uuid={self.uuid} bus={self.bus} name={self.name} memory_total={self.memory_total} "
            f"power_limit_w={self.power_limit_w} tick_s={self.tick_s} power={self.power} memory={self.memory} "
            f"utilization={self.utilization} unsupported={','.join(self.unsupported)}"
        )


@dataclass
class Trace:
    """A trace file and the faults beside it."""

    library: Path
    path: Path
    gpus: list[Gpu] = field(default_factory=list)

    def write(self, *gpus: Gpu) -> None:
        """Replace all devices."""
        self.gpus = list(gpus)
        self.path.write_text("".join(gpu.line() + "\n" for gpu in gpus))

    def fault(self, *lines: str) -> None:
        """Replace all faults, at once for every process that uses the trace; without lines all is well."""
        faults = Path(f"{self.path}.faults")
        draft = faults.with_suffix(".draft")
        draft.write_text("".join(line + "\n" for line in lines))
        draft.replace(faults)

    def environment(self) -> dict[str, str]:
        """Return what the environment of a process needs for its pynvml to see the trace."""
        others = os.environ.get("LD_LIBRARY_PATH", "")
        return {
            "LD_LIBRARY_PATH": f"{self.library}:{others}" if others else str(self.library),
            "NVML_TRACE": str(self.path),
        }

    @contextmanager
    def reader(self, site: Site) -> Iterator[RemoteReader]:
        """Open the device of ``site`` in a process of its own.

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
                process.stdin.close()  # which ends it; leaving the block waits for that


class RemoteReader:
    """A reader of ``effllm/devices/nvml.py`` that runs in another process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.device = Device(key="", kind="nvml")

    def open(self, site: Site) -> None:
        """Open the device there."""
        answer = self._ask(msgspec.json.encode(site))
        if answer.startswith(b"!"):
            raise DeviceUnavailable(answer[1:].decode())
        self.device = msgspec.json.decode(answer, type=Device)

    def read(self) -> tuple[Sample, dict[str, str]]:
        """Read the device there."""
        return msgspec.json.decode(self._ask(b"read"), type=tuple[Sample, dict[str, str]])

    def pass_time(self, seconds: float) -> None:
        """Let the reader's clock, not that of the trace, run ahead."""
        self._ask(b"pass %a" % seconds)

    def close_device(self) -> None:
        """Close the device there, but not the process."""
        self._ask(b"close")

    def _ask(self, line: bytes) -> bytes:
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that reads the device has ended"
        return answer.rstrip(b"\n")


def _serve() -> None:
    from effllm.devices import nvml

    ahead_s = 0.0

    def say(answer: bytes) -> None:
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()

    site = msgspec.json.decode(sys.stdin.buffer.readline(), type=Site)
    try:
        reader = nvml.open_device(site, clock=lambda: time.monotonic() + ahead_s)
    except DeviceUnavailable as error:
        say(b"!" + str(error).encode())
        return
    say(msgspec.json.encode(reader.device))
    for line in sys.stdin.buffer:
        command, *arguments = line.split()
        if command == b"pass":
            ahead_s += float(arguments[0])
        elif command == b"close":
            reader.close()
        say(msgspec.json.encode(reader.read()) if command == b"read" else b"ok")
    reader.close()


if __name__ == "__main__":
    _serve()
