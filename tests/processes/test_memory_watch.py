"""Memory of a rank: torch's own functions over an allocator of the test in place of a driver, and whole jobs.

No GPU is used.  The jobs have the traced GPU of the NVML library, which reports a constant memory in use.
"""

import jobs
import pytest
from nvml_library import GIB, Gpu, Trace, flat

from effllm.agent.measuring import RankMemory
from effllm.agent.proc import private_bytes
from effllm.records import ring
from effllm.records.rank import Allocator
from effllm.records.ring import MEMORY, RingReader, RingWriter
from effllm.trainer.declared import Declared
from effllm.trainer.rank_device import RankDevice
from effllm.trainer.watched_recorder import WatchedRecorder

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = jobs.needs_torch

GB = 10**9
FORBIDDEN = ("synchronize", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "empty_cache", "mem_get_info")


class FakeAllocator:
    """Replaces the functions of torch that need a driver; counts the readings."""

    def __init__(self, monkeypatch):
        self.used = self.peak = 0
        self.retries = self.errors = self.reads = 0
        self.is_initialized, self.is_capturing, self.error, self.forbidden = True, False, None, []
        cuda = torch.cuda
        for name in FORBIDDEN:
            monkeypatch.setattr(cuda, name, lambda *_, name=name: self.forbidden.append(name))
        for module in (cuda, cuda.memory):
            monkeypatch.setattr(module, "is_initialized", lambda: self.is_initialized)
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(cuda, "current_device", lambda: 0)
        monkeypatch.setattr(cuda, "device_count", lambda: 1)
        monkeypatch.setattr(cuda, "get_device_properties", lambda _index: None)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda _index: True, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_memoryStats", self._stats, raising=False)

    def use(self, used, peak=0):
        self.used, self.peak = used, max(self.peak, used, peak)

    def _stats(self, _index):
        self.reads += 1
        if self.error is not None:
            raise self.error
        known = {"current": self.used, "peak": self.peak}
        return {
            "allocated_bytes": {"all": known},
            "reserved_bytes": {"all": {name: size + GB for name, size in known.items()}},
            "inactive_split_bytes": {"all": {"current": GB // 2, "peak": GB}},
            "num_alloc_retries": self.retries,
            "num_ooms": self.errors,
        }


@pytest.fixture
def allocator(monkeypatch):
    found = FakeAllocator(monkeypatch)
    yield found
    assert found.forbidden == []


class Recorded:
    """A recorder with windows of five iterations."""

    def __init__(self, offset=0):
        self.writer = RingWriter(500)
        self.reader, self.warnings = RingReader(self.writer.descriptor), []
        self.recorder = WatchedRecorder(
            self.writer, 5, offset, warn=self.warnings.append, torch=torch, rank_device=RankDevice(torch, Declared())
        )
        self.recorder._device_times = None

    def iterate(self, count):
        for _ in range(count):
            self.recorder.start()
            self.recorder.end(100, 2)

    def memory(self):
        """Return what has run before each reading, its ordinal, and its values by name."""
        found = []
        for slot in self.reader.read_new():
            if slot.kind == MEMORY:
                values = [value for _, value in slot.values]
                found.append((slot.number, slot.ordinal, dict(zip(ring.MEMORY_FIELDS, values, strict=True))))
        return found

    def close(self):
        self.recorder.disable()
        self.reader.close()
        self.writer.close()


@pytest.fixture
def recorded(allocator):
    found = Recorded()
    yield found
    found.close()


def test_allocator_is_read_at_the_first_start_and_at_the_ends_of_windows(allocator, recorded):
    allocator.use(3 * GB, 5 * GB)
    recorded.recorder.start()
    recorded.recorder.record_positions(4096)
    recorded.recorder.record_positions(1024)
    recorded.recorder.end(100, 2)
    allocator.retries = 2
    recorded.iterate(9)
    found = recorded.memory()

    assert [one[:2] for one in found] == [(ring.AFTER_STARTUP, 0), (ring.AFTER_STEPS, 5), (ring.AFTER_STEPS, 10)]
    assert found[1][2] == {
        "allocated": 3.0 * GB, "allocated_peak": 5.0 * GB, "reserved": 4.0 * GB, "reserved_peak": 6.0 * GB,
        "fragmented": 0.5 * GB, "retries": 2.0, "out_of_memory": 0.0, "positions": 4096.0,
    }  # fmt: skip
    assert found[2][2]["positions"] == 0.0
    assert allocator.reads == 3


def test_allocator_is_read_at_the_start_and_the_end_of_a_phase(allocator, recorded):
    recorded.iterate(2)
    for _ in range(3):  # phases of the same kind are read once a window
        recorded.recorder.phase_start("evaluation")
        recorded.recorder.phase_start("other")
        recorded.recorder.phase_end()
        recorded.recorder.phase_end()
    recorded.iterate(3)

    assert [one[:2] for one in recorded.memory()] == [
        (ring.AFTER_STARTUP, 0), (ring.AFTER_STEPS, 2), (0, 2), (ring.AFTER_STEPS, 5),
    ]  # fmt: skip


def test_nothing_is_read_without_cuda_or_during_a_capture(allocator, recorded):
    allocator.is_initialized = False
    recorded.iterate(5)
    allocator.is_initialized, allocator.is_capturing = True, True
    recorded.iterate(5)

    assert (recorded.memory(), allocator.reads) == ([], 0)


def test_error_of_the_allocator_ends_the_readings_with_one_warning(allocator, recorded):
    allocator.error = RuntimeError("no statistics")
    recorded.iterate(20)
    recorded.recorder.phase_start("evaluation")
    recorded.recorder.phase_end()
    recorded.recorder.finish()

    assert recorded.warnings == ["the memory of torch's allocator is not measured: RuntimeError: no statistics"]
    assert allocator.reads == 1


def test_values_of_a_window_have_peaks_and_new_retries(allocator, recorded):
    memory = RankMemory(0, 5, 0)
    allocator.use(3 * GB, 5 * GB)
    recorded.iterate(4)
    allocator.retries = 3
    recorded.iterate(1)
    recorded.recorder.phase_start("checkpoint")
    allocator.use(3 * GB, 8 * GB)
    recorded.recorder.phase_end()
    recorded.iterate(5)
    for slot in recorded.reader.read_new():
        if slot.kind == MEMORY:
            memory.add_record(slot)
    (first, of_first), (second, of_second) = (memory.take_values(window, is_last=False) for window in (1, 2))

    assert first == second == Allocator(3.0 * GB, 4.0 * GB, 0.5 * GB)
    of_first, of_second = ({name: one.total for name, one in values.items()} for values in (of_first, of_second))
    assert of_first == {"allocator/startup_peak_bytes": 5.0 * GB, "allocator/retries": 3.0}
    assert of_second == {"allocator/checkpoint_peak_bytes": 8.0 * GB}


def test_forged_record_of_memory_is_not_valid(recorded):
    for number, values in [(9, [0.0] * 8), (4, [-1.0] * 8), (4, [float("nan")] * 8), (4, [1e300] * 8)]:
        recorded.writer.write_values(1, number, range(8), values, MEMORY)

    assert recorded.reader.read_new() == []
    assert recorded.reader.num_overrun == 4


def test_private_memory_of_a_process_that_has_ended_is_unknown():
    assert private_bytes(2**22 + 1) is None


#: A loop whose allocator is of the test: the memory grows, and an allocation fails at the end.
GROWING = """
import sys, time
import torch

GB = 10**9
now = {"current": 10 * GB, "peak": 10 * GB}
errors = [0]
torch.version.cuda = "13.0"
for module in (torch.cuda, torch.cuda.memory):
    module.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.current_device = lambda: 0
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda _index: None
torch._C._cuda_hasPrimaryContext = lambda _index: True
torch._C._cuda_memoryStats = lambda _index: {
    "allocated_bytes": {"all": now},
    "reserved_bytes": {"all": {"current": 75 * GB, "peak": 75 * GB}},
    "inactive_split_bytes": {"all": {"current": GB // 10, "peak": GB}},
    "num_alloc_retries": 4 * errors[0],
    "num_ooms": errors[0],
}
import effllm.efficientllm_metrics as effllm

effllm.initialize_efficientllm_metrics(1_000_000)
collector = effllm.get_metrics_collector()
for _ in range(150):
    collector.record_iteration_start()
    time.sleep(0.005)
    now["current"] += 400_000_000
    now["peak"] = now["current"] + 2 * GB
    collector.record_iteration_end(1000, 1)
errors[0] = 1
raise torch.OutOfMemoryError("CUDA out of memory")
"""


def test_job_foretells_growth_and_reports_the_error(launch, library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(Gpu("GPU-aaaa0001-0000-4000-8000-000000000001", "00000000:3B:00.0", memory=flat(72.0 * GIB)))
    job = launch.code(GROWING, environ=trace.environment(), device="nvml", log_interval=2).wait()
    events = {one.kind: one for one in job.ledger.events}

    assert job.code == 1
    # Of 80 GiB, 72 GiB are in use; 75 GB of these are torch's. So torch can have 83.59 GB.
    forecast = events["memory_forecast"].text
    assert "the allocated memory grows by 400 MB per iteration (400 MB to 400 MB)" in forecast
    assert forecast.endswith("of at most 83.59 GB")
    error = events["out_of_memory"].text
    assert "peak of steps 72.00 GB" in error
    assert (
        "0.10 GB fragmented (free, in partly used segments); 4 allocator retries so far; after iteration 150" in error
    )
    values = job.ledger.summary.instruments
    assert values["allocator/steps_peak_bytes"].most == 72 * GB
    assert values["allocator/retries"].total == 4.0
    verdict = job.ledger.summary.verdict
    assert verdict.text == "memory pressure: out of memory on rank 0"
    assert verdict.why == "peaks: steps 72.00 GB; 75.00 GB reserved, 0.10 GB fragmented; 4 allocator retries"


#: A loop that keeps 1 MB of each iteration, or has a cache that fills, with blocks of varying sizes.
LOOP = """
import random, sys, time
import effllm.efficientllm_metrics as effllm

kind, chance = sys.argv[1], random.Random(1)
effllm.initialize_efficientllm_metrics(1_000_000)
collector = effllm.get_metrics_collector()
kept, cache, blocks = [], {}, []
for iteration in range(900):
    collector.record_iteration_start()
    work = [b"x" * int(chance.expovariate(1 / 200_000)) for _ in range(20)]
    blocks = [*blocks[-10:], b"x" * int(chance.expovariate(1 / 500_000))]
    if kind == "leak":
        kept.append(b"x" * 1_000_000)
    elif iteration < 100:
        cache[iteration] = b"x" * 3_000_000
    time.sleep(0.004)
    del work
    collector.record_iteration_end(1000, 1)
effllm.finalize_efficientllm_metrics()
"""


@pytest.mark.parametrize(("kind", "is_leak"), [("leak", True), ("cache", False)])
def test_leak_of_a_process_is_found_and_a_cache_is_none(launch, tmp_path, kind, is_leak):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    job = launch.python(script, kind, log_interval=10).done()
    texts = [one.text for one in job.ledger.events if one.kind == "memory_leak"]

    assert len(texts) == is_leak
    if is_leak:
        assert texts[0].startswith("rank 0: the private memory of the training process grows steadily, by ")
        assert 0.8 <= float(texts[0].split("by ")[1].split(" MB")[0]) <= 1.3
        assert "if only this process grows, the available " in texts[0]
