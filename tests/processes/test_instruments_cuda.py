"""Instruments on CUDA devices: torch's own functions, over an allocator of the test in place of a driver.

No GPU is used. torch's Python functions are real; only the functions below these, which need a driver, are replaced.
"""

from __future__ import annotations

import json
import math
import warnings

import jobs
import pytest

from effllm.instruments import _device
from effllm.instruments._device import UnknownDevice
from effllm.instruments.profiling import ComprehensiveProfiler, GPUMemoryProfiler, TrainingTimer

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = jobs.needs_torch

GB = 10**9
#: Functions that wait for a device, or change torch's statistics: an instrument calls none of these.
FORBIDDEN = (
    "synchronize",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_accumulated_memory_stats",
    "empty_cache",
    "set_device",
)


class Allocator:
    """Memory of one device, with segments of 2 GB, which remain reserved."""

    def __init__(self):
        self.used = self.reserved = self.max_used = 0

    def change(self, size):
        self.used += size
        self.max_used = max(self.max_used, self.used)
        self.reserved = max(self.reserved, -(-self.used // (2 * GB)) * 2 * GB)

    def stats(self):
        used = {"current": self.used, "peak": self.max_used}
        return {
            "allocated_bytes": {"all": used},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.reserved}},
        }


class Devices:
    """Three CUDA devices; an event has the time of its device, in ms, and is passed at once."""

    def __init__(self, monkeypatch):
        self.allocators = [Allocator() for _ in range(3)]
        self.current, self.is_initialized, self.forbidden, self.error = 0, True, [], None
        self.now_ms, self.streams = 0.0, []
        cuda = torch.cuda
        for name in FORBIDDEN:
            monkeypatch.setattr(cuda, name, lambda *_, name=name: self.forbidden.append(name))
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "device_count", lambda: len(self.allocators))
        monkeypatch.setattr(cuda, "current_device", self._current_device)
        for module in (cuda, cuda.memory):
            monkeypatch.setattr(module, "is_initialized", lambda: self.is_initialized)
        monkeypatch.setattr(torch._C, "_cuda_memoryStats", self._stats, raising=False)
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(cuda, "current_stream", lambda index: ("stream", index))
        monkeypatch.setattr(cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(_device, "_warned_devices", set())

    def _current_device(self):
        self._raise()
        self.is_initialized = True
        return self.current

    def _stats(self, index):
        self._raise()
        return self.allocators[index].stats()

    def _raise(self):
        if self.error is not None:
            raise self.error


class Event:
    def __init__(self, devices):
        self._devices = devices

    def record(self, stream):
        self._devices._raise()
        self._devices.streams.append(stream)
        self._ms = self._devices.now_ms

    def query(self):
        self._devices._raise()
        return True

    def synchronize(self):
        self._devices._raise()
        self._devices.forbidden.append("Event.synchronize")

    def elapsed_time(self, end):
        return end._ms - self._ms


@pytest.fixture
def devices(monkeypatch):
    """Replace the driver; at the end, assert that no instrument waited or changed torch's statistics."""
    found = Devices(monkeypatch)
    yield found
    assert found.forbidden == []


def test_measurement_has_torchs_current_and_peak_memory_in_gb(devices):
    profiler = GPUMemoryProfiler("cuda:1")
    devices.allocators[1].change(5 * GB)
    devices.allocators[1].change(-2 * GB)

    assert profiler.measure("after_forward") == {
        "allocated_gb": torch.cuda.memory_allocated(1) / GB,
        "reserved_gb": torch.cuda.memory_reserved(1) / GB,
        "max_allocated_gb": torch.cuda.max_memory_allocated(1) / GB,
        "max_reserved_gb": torch.cuda.max_memory_reserved(1) / GB,
    } == {"allocated_gb": 3.0, "reserved_gb": 6.0, "max_allocated_gb": 5.0, "max_reserved_gb": 6.0}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "index"),
    [
        *((one, 1) for one in (1, "1", "cuda:1", torch.device("cuda", 1))),
        *((one, 2) for one in (None, "cuda", torch.device("cuda"))),  # the current device at construction
    ],
    ids=repr,
)
def test_device_is_read_while_another_device_is_current(devices, device, index, recwarn):
    devices.current = 2
    devices.allocators[2].change(GB)
    profiler = GPUMemoryProfiler(device)
    devices.allocators[index].change(4 * GB)
    devices.current = 0

    assert profiler.memory_of == f"cuda:{index}"
    assert profiler.measure()["allocated_gb"] == devices.allocators[index].used / GB
    assert list(recwarn) == []


@pytest.mark.parametrize("kind", [GPUMemoryProfiler, TrainingTimer, ComprehensiveProfiler])
@pytest.mark.parametrize(
    ("device", "line"),
    [
        (3, "device=3: torch sees 3 CUDA devices, 0 to 2"),
        ("cuda:7", "device='cuda:7': torch sees 3 CUDA devices, 0 to 2"),
        (-1, "device=-1: an index is 0 or more"),
        ("mps", "device='mps' is not an index, 'cpu', 'cuda' or 'cuda:N'"),
        (torch.device("xpu", 0), "device=device(type='xpu', index=0) is not an index, 'cpu', 'cuda' or 'cuda:N'"),
        (torch.device("meta"), "device=device(type='meta') is not an index, 'cpu', 'cuda' or 'cuda:N'"),
    ],
    ids=str,
)
def test_device_that_cannot_exist_is_rejected_with_one_line(devices, kind, device, line):
    with pytest.raises(UnknownDevice) as found:
        kind(device)

    assert str(found.value) == line


def test_current_device_of_a_forked_process_is_rejected_with_one_line(devices):
    devices.error = RuntimeError("Cannot re-initialize CUDA in forked subprocess.\nUse the 'spawn' start method")
    with pytest.raises(UnknownDevice) as found:
        GPUMemoryProfiler(None)

    reason = "torch cannot use CUDA in this process: Cannot re-initialize CUDA in forked subprocess."
    assert str(found.value) == f"device=None: {reason}"


def test_construction_with_an_index_does_not_initialize_cuda(devices):
    devices.is_initialized = False
    ComprehensiveProfiler(device=0)
    measured = GPUMemoryProfiler(device=0).measure()

    assert not devices.is_initialized
    assert measured["max_reserved_gb"] == 0.0  # torch has allocated nothing in this process


def iterate(profiler, devices):
    for _ in range(3):
        profiler.start_iteration()
        devices.allocators[devices.current].change(GB)
        profiler.end_iteration(1, 1)


def measure(profiler, _):
    profiler.measure()


def time_a_part(timer, _):
    with timer.time("forward"):
        pass


@pytest.mark.parametrize(
    ("kind", "use"), [(ComprehensiveProfiler, iterate), (GPUMemoryProfiler, measure), (TrainingTimer, time_a_part)]
)
def test_unused_device_beside_a_used_current_device_gives_one_warning(devices, kind, use):
    """A rank that trains on cuda:2 and was given device=0 would measure nothing of its own."""
    devices.current = 2
    devices.allocators[2].change(GB)
    instrument = kind(device=0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        use(instrument, devices)
        use(instrument, devices)

    assert [str(one.message) for one in warned] == [
        "cuda:0 is measured, but torch uses cuda:2 and has no memory on cuda:0 in this process; pass device=2"
    ]
    if kind is ComprehensiveProfiler:
        assert instrument.get_summary()["memory"]["peak_allocated_gb"] == 0.0  # of the named device


def test_model_on_two_devices_gives_no_warning(devices, recwarn):
    profilers = [ComprehensiveProfiler(index) for index in (0, 1)]
    for profiler in profilers:
        profiler.start_iteration()
    for index, profiler in enumerate(profilers):
        devices.allocators[index].change((index + 1) * GB)
        profiler.end_iteration(1, 1)

    assert [profiler.memory.get_summary()["peak_allocated_gb"] for profiler in profilers] == [1.0, 2.0]
    assert list(recwarn) == []


def test_baseline_and_leak_are_those_of_the_device(devices):
    profiler = GPUMemoryProfiler(device=1)
    devices.allocators[1].change(10 * GB)

    assert profiler.set_baseline() == 10.0
    devices.allocators[0].change(50 * GB)
    assert not profiler.detect_leak(threshold_gb=0.5, method="baseline")
    for _ in range(200):
        devices.allocators[1].change(GB // 1000)
        profiler.measure("step")
    assert profiler.detect_leak(threshold_gb=0.05)
    assert not profiler.detect_leak(threshold_gb=0.5, method="baseline")
    devices.allocators[1].change(GB)
    assert profiler.detect_leak(threshold_gb=0.5, method="baseline")
    assert profiler.get_summary()["baseline_gb"] == 10.0


def test_profile_of_a_device_has_memory_times_and_throughput(devices, tmp_path):
    profiler = ComprehensiveProfiler("cuda:1")
    profiler.memory.set_baseline()
    for _ in range(10):
        profiler.start_iteration()
        devices.allocators[1].change(3 * GB)
        devices.now_ms += 20.0
        devices.allocators[1].change(-2 * GB)
        profiler.end_iteration(num_samples=4, num_tokens=512)
    body = json.loads(profiler.export_to_json(tmp_path / "profile.json").read_text())

    assert body["memory"]["memory_of"] == "cuda:1"
    assert (body["memory"]["peak_allocated_gb"], body["memory"]["baseline_gb"]) == (12.0, 0.0)
    assert body["memory"]["mean_allocated_gb"] == pytest.approx(5.5)
    assert body["timing"]["iteration"]["mean_sec"] == pytest.approx(0.02)
    assert set(devices.streams) == {("stream", 1)}


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.\nCompile with TORCH_USE_CUDA_DSA"),
        ValueError("invalid device"),
        OSError("driver"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_of_the_device_ends_no_iteration(devices, error, tmp_path):
    profiler = ComprehensiveProfiler(device=0)
    devices.allocators[0].change(GB)
    profiler.start_iteration()
    profiler.end_iteration(1, 1)
    profiler.timer.start("open")
    devices.error = error
    with pytest.warns(UserWarning) as warned:
        for _ in range(5):
            profiler.start_iteration()
            measured = profiler.memory.measure("step")
            profiler.end_iteration(1, 1)
        profiler.timer.stop("open")
        assert math.isnan(profiler.memory.set_baseline())
        assert not profiler.memory.detect_leak()
        assert not profiler.memory.detect_leak(method="baseline")
        body = json.loads(profiler.export_to_json(tmp_path / "profile.json").read_text())

    assert all(math.isnan(value) for value in measured.values())
    first = str(error).splitlines()[0]
    assert sorted(str(one.message) for one in warned) == [
        f"the memory of cuda:0 cannot be read and is not measured: {first}",
        f"times on cuda:0 cannot be read and are not measured: {first}",
    ]
    assert body["timing"]["iteration"]["not_measured"] >= 5
    assert body["memory"]["peak_allocated_gb"] == 1.0  # measured before the error


def test_timer_with_sync_waits_for_its_own_event_only(devices):
    timer = TrainingTimer(device=1, sync=True)
    timer.start("forward")
    devices.now_ms = 8.0
    assert timer.stop("forward") == pytest.approx(0.008)
    assert devices.forbidden == ["Event.synchronize"]  # `sync=True` asks for this wait
    devices.forbidden.clear()

    timer.start("forward")
    with pytest.warns(UserWarning, match="times on cuda:1 cannot be read"):
        devices.error = RuntimeError("an illegal memory access was encountered")
        assert math.isnan(timer.stop("forward"))
    assert timer.get_summary()["forward"]["count"] == 1


@pytest.mark.parametrize(("device", "is_used"), [(None, True), (0, False)])
def test_only_a_device_with_a_context_gets_events_and_values(monkeypatch, device, is_used):
    """Three devices, of which the script uses the second, without `set_device`."""
    devices = Devices(monkeypatch)
    devices.allocators[1].change(3 * GB)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 1, raising=False)
    timer, memory = TrainingTimer(device), GPUMemoryProfiler(device)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        time_a_part(timer, devices)

    assert devices.streams == [("stream", 1)] * 2 * is_used
    assert memory.measure()["allocated_gb"] == pytest.approx(3.0 if is_used else math.nan, nan_ok=True)
    assert timer.get_summary()["forward"].get("not_measured") == (None if is_used else 1)
    line = "cuda:0 is measured, but torch uses cuda:1 and has no memory on cuda:0"
    assert [str(one.message).startswith(line) for one in warned] == [True] * (not is_used)
