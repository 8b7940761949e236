"""effllm/trainer/torch_profile.py with the real torch.profiler on the CPU; other profilers must still work."""

import os
import subprocess
import sys
import time
import types

import jobs
import pytest

from effllm.records import timeline
from effllm.trainer.cuda_graphs import GRAPHS
from effllm.trainer.torch_profile import TorchProfile, device_split

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytestmark = jobs.needs_torch

CPU = [torch.profiler.ProfilerActivity.CPU]


@pytest.fixture
def warned():
    return []


@pytest.fixture
def profile(warned):
    profile = TorchProfile(2, warned.append)
    yield profile
    profile.close()


def work():
    return torch.randn(64, 64) @ torch.randn(64, 64)


def profiled(profile, *numbers):
    """Profile iterations that work; return whether each of them has a profile."""
    found = []
    for number in numbers:
        profile.start_if_due(number)
        work()
        found.append(profile.end(time.monotonic_ns()))
    return found


def names(profiler):
    return {event.name() for event in profiler.profiler.kineto_results.events()}


def test_every_second_iteration_is_profiled(profile, warned):
    found = profiled(profile, 1, 2, 3, 4, 5)

    assert [one is not None for one in found] == [False, True, False, True, False]
    assert warned == []
    for one in (found[1], found[3]):
        split = one.split
        assert split.computing_ns > 0 and split.communication_ns == split.exposed_ns == 0
        assert split.computing_ns + split.idle_ns == split.duration_ns
        assert one.cost_ns > 0


@pytest.mark.parametrize("earlier", [[], [1]])
def test_running_profiler_is_not_disturbed(profile, warned, earlier):
    profiled(profile, *earlier)
    with torch.profiler.profile(activities=CPU) as theirs:
        assert profiled(profile, 2, 3, 4, 5) == [None] * 4

    assert "aten::mm" in names(theirs)
    assert profiled(profile, 6) != [None], "later iterations can be profiled again"
    assert warned == []


def test_profile_ends_if_another_profiler_starts_in_an_iteration(profile, warned):
    profile.start_if_due(2)
    theirs = torch.profiler.profile(activities=CPU)
    theirs.start()
    work()
    assert profile.end(time.monotonic_ns()) is None
    work()
    theirs.stop()

    assert "aten::mm" in names(theirs)
    assert warned == []


def test_profiler_in_warm_up_is_not_disturbed(profile):
    schedule = torch.profiler.schedule(wait=1, warmup=2, active=2, repeat=1)
    records = []
    with torch.profiler.profile(
        activities=CPU, schedule=schedule, on_trace_ready=lambda done: records.append(names(done))
    ) as theirs:
        given = []
        for number in range(1, 9):
            profile.start_if_due(number)
            work()
            given.append(profile.end(time.monotonic_ns()) is not None)
            theirs.step()

    assert len(records) == 1 and "aten::mm" in records[0]
    # The other profiler waits in iteration 1, warms up in 2 and 3, and is active in 4 and 5.  It does not profile later
    # iterations.
    assert given == [False, False, False, False, False, True, False, True]


@pytest.mark.parametrize("holder", ["NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH"])
def test_tool_that_uses_cupti_disables_profiling_with_a_warning(monkeypatch, warned, holder):
    monkeypatch.setenv(holder, "1")
    profile = TorchProfile(1, warned.append)
    assert profiled(profile, 1, 2) == [None, None]
    profile.close()

    (line,) = warned
    assert holder in line


def test_torch_profiler_functions_are_restored_on_close(warned):
    module = torch.autograd.profiler
    before = module._prepare_profiler, module._enable_profiler, module._disable_profiler
    profile = TorchProfile(1, warned.append)
    profile.start_if_due(1)  # and never ends
    assert module._enable_profiler is not before[1]

    profile.close()

    assert (module._prepare_profiler, module._enable_profiler, module._disable_profiler) == before
    assert not torch.autograd._profiler_enabled()


def test_iteration_without_an_end_returns_no_profile(profile):
    profile.start_if_due(2)
    assert profiled(profile, 3) == [None]
    assert profiled(profile, 4) != [None]


def test_profiled_iteration_ends_at_the_given_time(profile):
    profile.start_if_due(2)
    began_ns = time.monotonic_ns()
    work()
    ended_ns = time.monotonic_ns()
    while time.monotonic_ns() < ended_ns + 50_000_000:
        work()
    split = profile.end(ended_ns).split

    # The clock of the profiler and the monotonic clock differ by microseconds.
    assert split.duration_ns < ended_ns - began_ns + 5_000_000
    assert split.computing_ns <= split.duration_ns


def test_child_forked_in_an_iteration_records_nothing(profile, warned):
    profile.start_if_due(2)
    child = os.fork()
    if not child:
        os._exit(torch.autograd._profiler_enabled())
    assert os.waitpid(child, 0)[1] == 0
    assert profile.end(time.monotonic_ns()) is None

    assert profiled(profile, 4) != [None]
    assert warned == []


def test_profiler_records_of_older_torch_are_in_microseconds():
    class Older(Record):
        start_ns = duration_ns = property()

        def start_us(self):
            return self._values[1] // 1000

        def duration_us(self):
            return self._values[2] // 1000

    found = device_split(
        [Older("gemm", 1_000_000, 1_002_000), Older("ncclKernel_AllGather_RING", 1_001_000, 1_006_000)]
    )

    assert found[:5] == (6000, 5000, 4000, 2000, 0)


def stand_in(failing="", **more):
    """Return a fake torch module; its profiler fails in the call ``failing``."""

    class Profiler:
        kineto_results = types.SimpleNamespace(events=list)

        def __init__(self, use_kineto, use_cpu, use_device=None):
            assert (use_kineto, use_cpu, use_device) == (True, False, "cuda")
            if failing == "make":
                raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

        def __enter__(self):
            if failing == "start":
                raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

        def __exit__(self, *_):
            if failing == "stop":
                raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    functions = {f"_{verb}_profiler": lambda: None for verb in ("prepare", "enable", "disable")}
    return types.SimpleNamespace(
        autograd=types.SimpleNamespace(profiler=types.SimpleNamespace(profile=Profiler, **functions)),
        cuda=types.SimpleNamespace(is_initialized=lambda: True),
        **more,
    )


@pytest.mark.parametrize("failed", [False, True])
def test_end_of_training_in_an_iteration_does_not_wait_for_the_gpu(warned, failed):
    torch_like = stand_in("stop")  # in this call the real profiler waits for the device
    dropped = []
    torch_like.autograd.profiler._disable_profiler = lambda: dropped.append(True)
    profile = TorchProfile(1, warned.append, torch_like)
    profile.start_if_due(1)
    profile.close(failed)

    assert (warned, dropped) == ([], [] if failed else [True])


def without_function(torch_like):
    del torch_like.autograd.profiler._enable_profiler
    return torch_like


CUPTI = "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"


@pytest.mark.parametrize(
    ("torch_like", "reason"),
    [
        *((stand_in(call), CUPTI) for call in ("make", "start", "stop")),
        (stand_in(), "no kernel"),
        (without_function(stand_in()), "_enable_profiler"),
    ],
    ids=["make", "start", "stop", "no kernels", "unknown version"],
)
def test_failing_profiler_is_disabled_with_one_warning(warned, torch_like, reason):
    profile = TorchProfile(1, warned.append, torch_like)
    assert profiled(profile, 1, 2, 3, 4) == [None] * 4

    (line,) = warned
    assert reason in line


@pytest.mark.parametrize(
    ("cuda", "captured", "is_refused"), [("12.4", 1, True), ("12.6", 1, False), ("12.4", 0, False)]
)
def test_graphs_are_not_profiled_by_an_old_cupti(monkeypatch, warned, cuda, captured, is_refused):
    monkeypatch.setattr(GRAPHS, "num_captured", captured)
    torch = stand_in()
    torch.version = types.SimpleNamespace(cuda=cuda)
    profile = TorchProfile(1, warned.append, torch)
    profile.start_if_due(1), profile.start_if_due(2)

    assert [line for line in warned if "CUDA graphs" in line] == warned[:1] * is_refused


def test_profiling_does_not_import_the_compiler():
    program = """
import sys, time, torch
from effllm.trainer.torch_profile import TorchProfile
had, profile = set(sys.modules), TorchProfile(1, print)
profile.start_if_due(1)
torch.ones(2) + 1
assert profile.end(time.monotonic_ns()) is not None
print(*[name for name in sys.modules if name not in had and name.startswith("torch")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == ([], "")


class Record:
    """A fake Kineto record of one activity."""

    def __init__(self, name, start_ns, end_ns, device="DeviceType.CUDA", activity="kernel", metadata=""):
        self._values = name, start_ns, end_ns - start_ns, device, activity, metadata

    def name(self):
        return self._values[0]

    def start_ns(self):
        return self._values[1]

    def duration_ns(self):
        return self._values[2]

    def device_type(self):
        return self._values[3]

    def activity_type(self):
        return self._values[4]

    def metadata_json(self):
        return self._values[5]


def test_iteration_on_a_device_lasts_from_first_to_last_record():
    nccl = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
    group = '"Process Group Name": "3", "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"'
    on_cpu = Record("cudaLaunchKernel", 0, 900, "DeviceType.CPU", "cuda_runtime")
    found = device_split([
        on_cpu,
        Record("nccl:all_reduce", 0, 900, activity="gpu_user_annotation"),
        Record("gemm", 100, 160),
        Record("gemm", 150, 180),  # on another stream
        Record(nccl, 170, 230),
        Record(nccl, 250, 260, metadata=group),
        Record("Memcpy DtoH", 290, 300, activity="gpu_memcpy"),
    ])  # fmt: skip

    # The iteration lasts from 100 to 300 ns. Computation is from 100 to 180 and from 290 to 300, together 90 ns.
    # Communication lasts 60 + 10 ns; its part from 170 to 180 is hidden behind computation.
    assert found == timeline.Split(200, 70, 60, 90, 50, {"tp": (10, 10), "all_reduce": (60, 50)})
    assert device_split([on_cpu]) is None
