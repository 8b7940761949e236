"""Memory of a training process: current and peak use, and growth over iterations."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from typing import Any

from effllm.instruments._device import cuda_index, first_line, has_context, warn_of_other_device
from effllm.instruments._number import UserWarnings, number, record
from effllm.instruments._statistics import NAN, Statistics
from effllm.memory.watch import MemoryBlocks, MemoryTrend

GB = 1e9
#: Maximum number of tags of `GPUMemoryProfiler.measure` with their own trend; later tags have no trend.
MAX_TAGS = 32
#: Number of measurements of a tag before its trend is judged. With 128, and a quarter of the blocks ignored, caches
#: that grew to 400 MB in 100 iterations were reported as leaks: tests/processes/test_memory_leaks.py has such loops.
MIN_MEASUREMENTS = 192
_LEAK_CHECKS = "detect_leak"  # tag of the rare measurements of `GPUMemoryProfiler.detect_leak`


class GPUMemoryProfiler:
    """Reads the memory that torch's allocator uses on a device; without CUDA, the memory of the process.

    torch's peaks are read and never reset, because the script may use them.  Without CUDA ``allocated`` is the private
    memory of the process, and ``reserved`` is all memory of the process, including files and libraries.  The values
    are of the given device, also while another device is torch's current device.  If torch cannot read the statistics
    of the device, the values are NaN, with one warning.

    Args:
        device: an index, ``"cuda:1"``, ``"cpu"``, or ``None`` for the only device that is used, else the current one.

    Raises:
        UnknownDevice: the device cannot exist, or is not a CUDA device or the CPU.
    """

    def __init__(self, device: Any = 0) -> None:
        self.device = device
        self._index = cuda_index(device)
        self._baseline_bytes: float | None = None
        self._allocated_bytes = Statistics(max_recent=1)
        self._peak_bytes = 0.0
        self._trends: dict[str, MemoryBlocks] = {}  # by tag
        self._is_device_checked, self._warn_once = False, UserWarnings()  # see `warn_of_other_device`

    @property
    def memory_of(self) -> str:
        """The measured memory: ``cuda:N``, or ``process``."""
        return "process" if self._index is None else f"cuda:{self._index}"

    def measure(self, tag: str = "", iteration: int | None = None) -> dict[str, float]:
        """Return allocated and reserved memory with their peaks, in GB (10^9 bytes).

        Args:
            tag: name of the place in the loop; a trend compares only measurements with the same tag.
            iteration: number of the iteration; by default, the number of measurements with this tag.
        """
        allocated, reserved, max_allocated, max_reserved = self._read_memory()
        self._allocated_bytes.add(allocated)
        if math.isnan(allocated):  # a system without /proc, or a device without statistics
            return dict.fromkeys(("allocated_gb", "reserved_gb", "max_allocated_gb", "max_reserved_gb"), NAN)
        self._peak_bytes = max(self._peak_bytes, max_allocated, allocated)
        record("memory/allocated_bytes", allocated)
        record("memory/reserved_bytes", reserved)
        if tag in self._trends or len(self._trends) < MAX_TAGS:
            self._trends.setdefault(tag, MemoryBlocks()).add(number(iteration), allocated)
        return {
            "allocated_gb": allocated / GB,
            "reserved_gb": reserved / GB,
            "max_allocated_gb": self._peak_bytes / GB if self._index is None else max_allocated / GB,
            "max_reserved_gb": max_reserved / GB,
        }

    def set_baseline(self) -> float:
        """Take the memory in use now as the baseline, and drop the trend so far; return the baseline in GB."""
        self._baseline_bytes = self._read_memory()[0]
        self._trends = {}
        return self._baseline_bytes / GB

    def trend(self, tag: str | None = None) -> MemoryTrend | None:
        """Return the trend of a tag, by default of the tag with most measurements; ``None`` if it is not known yet."""
        if tag is None:
            tag = max(self._trends, key=lambda name: self._trends[name].num_measurements, default="")
        blocks = self._trends.get(tag)
        if blocks is None or (tag != _LEAK_CHECKS and blocks.num_measurements < MIN_MEASUREMENTS):
            return None
        return blocks.trend()

    def detect_leak(self, threshold_gb: float = 0.1, method: str = "trend") -> bool:
        """Measure, and return whether memory leaks.

        Args:
            threshold_gb: growth in GB (10^9 bytes) that is accepted.
            method: with ``"trend"``, a leak is steady growth that is certainly above the threshold; with
                ``"baseline"``, a leak is memory above `set_baseline` by more than the threshold, which a longer batch
                or a jump of the allocator can also cause.

        Raises:
            ValueError: the method is unknown, or there is no baseline.
        """
        if method not in ("trend", "baseline"):
            raise ValueError(f"method={method!r} is neither 'trend' nor 'baseline'")
        used_bytes = self.measure(_LEAK_CHECKS)["allocated_gb"] * GB
        if method == "baseline":
            if self._baseline_bytes is None:
                raise ValueError("detect_leak(method='baseline') needs set_baseline() before")
            return used_bytes - self._baseline_bytes > threshold_gb * GB
        trend = self.trend()
        return trend is not None and trend.is_growing and trend.certain_bytes > threshold_gb * GB

    def get_summary(self) -> dict[str, Any]:
        """Return peak and mean of the allocated memory and the baseline in GB, and the trend; NaN if not measured."""
        trend = self.trend()
        allocated = self._allocated_bytes.moments
        is_measured = allocated.count > 0
        summary: dict[str, Any] = {
            "memory_of": self.memory_of,
            "peak_allocated_gb": self._peak_bytes / GB if is_measured else NAN,
            "mean_allocated_gb": allocated.mean / GB,
            "baseline_gb": NAN if self._baseline_bytes is None else self._baseline_bytes / GB,
        }
        if trend is not None:
            summary["growth_gb_per_1000_iterations"] = trend.growth_bytes / GB
            summary["growth_interval_gb"] = [trend.low_bytes / GB, trend.high_bytes / GB]
            summary["is_growing"] = trend.is_growing
        return summary

    def _read_memory(self) -> tuple[float, float, float, float]:
        """Return allocated bytes, reserved bytes, and the peaks of both; NaN if they cannot be read."""
        if self._index is None:
            return _process_memory()
        cuda: Any = sys.modules["torch"].cuda
        if not self._is_device_checked:
            self._is_device_checked = warn_of_other_device(self._index)
        if not has_context(self._index):
            return NAN, NAN, NAN, NAN
        try:
            stats = cuda.memory_stats(self._index)  # torch.cuda's four functions would read these statistics four times
        except Exception as error:  # noqa: BLE001 - an allocator without statistics, or a failed device
            line = f"the memory of {self.memory_of} cannot be read and is not measured: {first_line(error)}"
            self._warn_once(line, "memory", stacklevel=4)
            return NAN, NAN, NAN, NAN
        return tuple(  # type: ignore[return-value]
            float(stats.get(f"{name}_bytes.all.{kind}", 0))
            for kind in ("current", "peak")
            for name in ("allocated", "reserved")
        )


#: Lines of /proc/self/status.
_STATUS_LINES = re.compile(rb"^(RssAnon|VmRSS|VmHWM):\s*(\d+) kB$", re.MULTILINE)


def _process_memory() -> tuple[float, float, float, float]:
    """Return private and resident bytes of this process, and their peaks; the kernel keeps no peak of private bytes."""
    sizes: dict[bytes, float] = {}
    with contextlib.suppress(OSError, ValueError):
        # With cold caches this takes 75 us, and `Path.read_bytes` takes 166 us.
        fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            sizes = {name: float(kilobytes) * 1024 for name, kilobytes in _STATUS_LINES.findall(os.read(fd, 8192))}
        finally:
            os.close(fd)
    resident = sizes.get(b"VmRSS", NAN)
    private = sizes.get(b"RssAnon", resident)
    return private, resident, private, sizes.get(b"VmHWM", resident)
