"""effllm on a real NVIDIA GPU: ``pytest -m gpu tests/processes/test_on_a_gpu.py``, at most a minute.

Each test is skipped, with its reason, on a machine without an NVIDIA driver or without a torch that can use the GPU.
No GPU has run these tests yet.
"""

from __future__ import annotations

import time

import pynvml
import pytest

from benchmarks import gpu_training
from effllm.agent.gpu_energy import GpuEnergy
from effllm.devices import DeviceUnavailable, Site, open_device
from effllm.devices.known.hardware import peak_flops_per_s
from effllm.hooks._batches import LateSums, LazyNumber
from effllm.sensor_profile.load import TorchLoad
from effllm.trainer.declared import Declared
from effllm.trainer.rank_device import RankDevice
from effllm.trainer.watched_recorder import DeviceMemory, DeviceTime

pytestmark = pytest.mark.gpu

STEPS = 40
PROFILE = {"EFFICIENTLLM_PROFILE_EVERY": "10"}


@pytest.fixture(scope="module")
def reader():
    try:
        found = open_device("nvml", Site())
    except DeviceUnavailable as error:
        pytest.skip(str(error))
    yield found
    found.close()


@pytest.fixture(scope="module")
def torch(reader):
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip(f"torch {found.__version__} finds no GPU")
    return found


@pytest.fixture(scope="module")
def measured(torch):
    """A training loop with metrics, as the loop itself and as effllm have seen it."""
    return gpu_training.train("plain", STEPS, is_measured=True)


def kinds(seen):
    return {event["kind"] for event in seen.events}


def test_memory_utilization_and_energy_of_a_real_gpu_are_measured(reader):
    sample, failures = reader.read()

    assert failures == {}
    assert reader.device.key.startswith("GPU-")
    assert 0 < sample.memory_bytes <= reader.device.memory_total_bytes
    assert 0 <= sample.utilization <= 1
    assert sample.energy_j > 0
    assert sample.power_w > 0


def test_losses_are_the_same_with_metrics_and_without(torch, measured):
    off = gpu_training.train("plain", STEPS, is_measured=False)

    assert measured.loop["losses"] == off.loop["losses"]


def test_all_steps_and_tokens_of_a_loop_are_counted(torch, measured):
    # The first step begins before the metrics: effllm counts from its end, or from its start.
    steps = len(measured.loop["losses"])
    assert measured.summary["status"] == "completed"
    assert steps - 1 <= measured.summary["iterations"] <= steps
    assert measured.summary["tokens"] == measured.summary["iterations"] * measured.loop["tokens_per_step"]
    assert not kinds(measured) & {"stalled", "hang", "gpu_shared"}


def test_device_time_of_a_step_agrees_with_the_events_of_the_loop(torch, measured):
    assert measured.metric("device_step_seconds") == pytest.approx(measured.loop["device_step_s"], rel=0.05)


def test_mfu_agrees_with_the_rate_of_the_loop_and_is_not_doubted(torch, reader, measured):
    peak = peak_flops_per_s(reader.device.name)
    if peak is None:
        pytest.skip(f"the hardware table has no BF16 peak of {reader.device.name}")

    assert measured.metric("mfu_ratio") == pytest.approx(gpu_training._mfu(measured.loop, peak), rel=0.1)
    assert (measured.summary.get("audit") or {}).get("doubts", []) == []


def test_peak_of_the_allocator_is_that_of_torch(torch, measured):
    peak = measured.summary["instruments"]["allocator/steps_peak_bytes"]["most"]

    assert peak == pytest.approx(measured.loop["allocated_peak_bytes"])


def test_profiled_steps_are_computing_and_have_no_communication(torch):
    seen = gpu_training.train("plain", STEPS, is_measured=True, settings=PROFILE)
    profile = seen.summary["profile"]

    assert profile["iterations"] >= 2
    assert 0.5 < profile["computing_s"] / profile["time_s"] <= 1.0
    assert profile["exposed_s"] < 0.01 * profile["time_s"]


def test_replays_of_a_captured_step_are_counted(torch):
    seen = gpu_training.train("captured", STEPS, is_measured=True)

    assert seen.summary["iterations"] >= len(seen.loop["losses"])
    assert not kinds(seen) & {"stalled", "hang"}


def test_graphs_of_torch_compile_run_beside_a_profiler(torch):
    seen = gpu_training.train("compiled", STEPS, is_measured=True, settings=PROFILE)

    assert seen.summary["status"] == "completed"
    assert seen.summary["iterations"] >= len(seen.loop["losses"]) - 1


def test_late_sums_and_numbers_arrive_without_a_wait_for_the_gpu(torch):
    sums = LateSums(2)
    busy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(20):
        busy = busy @ busy * 1e-4
    began_s = time.perf_counter()
    assert sums.add_numbers((torch.tensor(40, device="cuda"), torch.tensor(2)))
    number = LazyNumber(1, torch.tensor(0.5, device="cuda"))
    early = sums.take_sums()
    waited_s = time.perf_counter() - began_s
    device_began_s = time.perf_counter()
    torch.cuda.synchronize()

    assert waited_s < time.perf_counter() - device_began_s, "the calls return before the products are done"
    assert [one + other for one, other in zip(early, sums.wait_and_take_sums(), strict=True)] == [40, 2]
    assert number.value_if_ready() == 0.5


def test_events_and_allocator_belong_to_the_gpu_of_the_rank(torch):
    torch.zeros(1, device="cuda")
    declared = Declared()
    declared.parameter_devices = (0,)
    device = RankDevice(torch, declared)
    assert device.find_gpus()
    times, memory = DeviceTime(torch.cuda, device), DeviceMemory(torch.cuda, device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        begin.record()
        times.mark_start()
        torch.cuda._sleep(20_000_000)
        times.mark_end()
        end.record()
    torch.cuda.synchronize()
    times.mark_start()
    times.mark_end()

    assert times.num_iterations == 3
    assert times.total_ns / 3e6 == pytest.approx(begin.elapsed_time(end), rel=0.05)
    assert memory.read_allocator()[0] == torch.cuda.memory_allocated()


def test_energy_of_a_known_load_is_that_of_the_counter(torch, reader):
    energy = GpuEnergy("nvml", {"CUDA_VISIBLE_DEVICES": reader.device.key}, 1.0)
    load = TorchLoad(reader.device.key).opened()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(reader.device.key)
    try:
        energy.start_samplers()
        load.start_stretches([6.0])
        time.sleep(1.0)
        start_s, before_mj = time.monotonic(), pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        time.sleep(4.0)
        end_s, after_mj = time.monotonic(), pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        joules = energy.take_joules(start_s, end_s)
    finally:
        load.close()
        energy.close()
        pynvml.nvmlShutdown()

    assert joules == pytest.approx((after_mj - before_mj) / 1e3, rel=0.06)  # the bare counter is 0.1 s late at each end


def test_gpu_of_the_rank_has_the_uuid_that_the_driver_reports(torch, reader):
    torch.zeros(1, device="cuda")
    declared = Declared()
    RankDevice(torch, declared).find_gpus()
    site = Site(cuda_uuid=declared.facts.cuda_uuid, cuda_pci_bus_id=declared.facts.cuda_pci_bus_id)

    assert declared.facts.unclear_gpu == ""
    assert open_device("nvml", site).device.key == reader.device.key
