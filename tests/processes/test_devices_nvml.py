"""effllm/devices/nvml.py with the real pynvml and the NVML library of the tests."""

import os
import subprocess
import sys
import time

import pytest
from cases import cases
from nvml_library import GIB, Gpu, Trace, flat

from effllm.devices import DeviceUnavailable, Site
from effllm.devices._nvml_identity import choose_uuid

# C, A, B is the order of NVML; the order of the PCI buses is A, B, C. Each GPU has a different amount of used memory.
GPU_C = Gpu("GPU-cccc0003-0000-4000-8000-000000000003", "00000000:C1:00.0", memory=flat(3 * GIB))
GPU_A = Gpu("GPU-aaaa0001-0000-4000-8000-000000000001", "00000000:3B:00.0", memory=flat(1 * GIB))
GPU_B = Gpu("GPU-aaaa0002-0000-4000-8000-000000000002", "00000000:5E:00.0", memory=flat(2 * GIB))
MIG = Gpu("MIG-dddd0004-0000-5000-8000-000000000004", parent=2, memory=flat(5 * GIB), memory_total=10 * GIB)
A, B, C = GPU_A.uuid, GPU_B.uuid, GPU_C.uuid

NO_PERMISSION, UNKNOWN_ERROR = 4, 999
NOT_AVAILABLE_32, NOT_AVAILABLE_64 = 2**32 - 1, 2**64 - 1


@pytest.fixture
def trace(library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(GPU_C, GPU_A, GPU_B)
    return trace


@pytest.fixture
def sliced(trace):
    trace.write(GPU_C, GPU_A, GPU_B, MIG)
    return trace


@pytest.fixture
def reader(trace):
    with trace.reader(Site(cuda_uuid=A)) as reader:
        yield reader


def device_of(trace, **site):
    """Return the key and the used memory (GiB) of the opened device; each of these values identifies the device."""
    with trace.reader(Site(**site)) as reader:
        sample, failures = reader.read()
        assert not failures
        return reader.device.key, sample.memory_bytes / GIB


@cases(
    ("visible", "local_rank", "expected"),
    [
        (None, 0, A),
        (None, 2, C),
        (None, 3, None),
        ("", 0, None),
        ("-1", 0, None),
        ("0,1", 2, None),
        ("2,0,1", 0, C),
        ("2,0,1", 1, A),
        ("1", 0, B),
        ("1", 2, B),  # the launcher makes one GPU visible to each rank
        (f"{C},{A}", 1, A),
        ("GPU-cccc", 0, C),
        ("GPU-aaaa", 0, None),  # two GPUs begin so
        ("GPU-none", 0, None),
        (f" {B} , 2 ", 1, C),
        ("1,99,0", 0, B),
        ("1,99,0", 1, None),  # CUDA ignores all entries after an invalid one
    ],
)
def test_visible_devices_in_any_order_select_the_correct_gpu(visible, local_rank, expected):
    site, in_bus_order = Site(visible_devices=visible, local_rank=local_rank), [A, B, C]

    if expected:
        assert choose_uuid(site, in_bus_order) == expected
    else:
        with pytest.raises(DeviceUnavailable, match=f"local rank {local_rank} has no GPU"):
            choose_uuid(site, in_bus_order)


def test_visible_gpu_of_a_rank_is_opened(trace):
    assert device_of(trace, local_rank=2) == (C, 3)
    assert device_of(trace, visible_devices="2,0,1", local_rank=1) == (A, 1)
    with pytest.raises(DeviceUnavailable, match="local rank 3 has no GPU"), trace.reader(Site(local_rank=3)):
        pass


@pytest.mark.parametrize(
    "site", [{"cuda_uuid": C}, {"cuda_uuid": C.removeprefix("GPU-")}, {"cuda_pci_bus_id": "0000:C1:00.0"}]
)
def test_identity_that_torch_returns_selects_the_gpu(trace, site):
    assert device_of(trace, **site, visible_devices="0,1", local_rank=1) == (C, 3)


def test_gpu_of_torch_that_is_not_found_raises_an_error(trace):
    with pytest.raises(DeviceUnavailable, match="does not list the GPU"), trace.reader(Site(cuda_uuid="GPU-gone")):
        pass


@pytest.mark.parametrize(
    ("fault", "visible"),
    [
        ("1 handle error 4", "0"),  # no permission for A, as in a container with B and C
        ("0 handle error 999", "1"),  # "Unable to determine the device handle for GPU C: Unknown Error"
    ],
)
def test_hidden_gpu_is_not_counted_and_a_failing_one_is(trace, fault, visible):
    trace.fault(fault)

    assert device_of(trace, visible_devices=visible) == (B, 2)


def test_name_key_and_limits_of_a_device_are_read(reader):
    device = reader.device

    assert (device.key, device.name, device.is_gpu, device.shared) == (A, "Traced", True, False)
    assert (device.memory_total_bytes, device.power_limit_w) == (80 * GIB, 700.0)
    assert (device.energy_method, device.power_scope, device.not_measured) == ("counter", "gpu", ())


def test_sample_has_the_values_at_its_timestamp(trace):
    trace.write(Gpu(A, "0:01:00", power=flat(300.0), utilization=flat(0.37)))

    with trace.reader(Site(cuda_uuid=A)) as reader:
        before_ns = time.monotonic_ns()
        sample, failures = reader.read()
        after_ns = time.monotonic_ns()

    assert failures == {}
    assert before_ns <= sample.time_ns <= after_ns
    assert (sample.memory_bytes, sample.utilization, sample.power_w) == (40 * GIB, 0.37, 300.0)
    assert 300 * before_ns / 1e9 - 0.01 <= sample.energy_j <= 300 * after_ns / 1e9


@pytest.mark.parametrize(
    ("fault", "name", "reason"),
    [
        (f"memory error {UNKNOWN_ERROR}", "memory_bytes", "Unknown Error"),
        (f"utilization error {UNKNOWN_ERROR}", "utilization", "Unknown Error"),
        (f"power error {UNKNOWN_ERROR}", "power_w", "Unknown Error"),
        (f"energy error {UNKNOWN_ERROR}", "energy_j", "Unknown Error"),
        # a permission that is lost after the opening
        (f"memory error {NO_PERMISSION}", "memory_bytes", "Insufficient Permissions"),
        (f"energy error {NO_PERMISSION}", "energy_j", "Insufficient Permissions"),
        (f"clocks.sm error {NO_PERMISSION}", "sm_clock_hz", "Insufficient Permissions"),
        (f"throttle error {NO_PERMISSION}", "throttled_by", "Insufficient Permissions"),
        (f"memory value {NOT_AVAILABLE_64}", "memory_bytes", "unavailable value"),
        (f"utilization value {NOT_AVAILABLE_32}", "utilization", "unavailable value"),
        (f"power value {NOT_AVAILABLE_32}", "power_w", "unavailable value"),
        (f"energy value {NOT_AVAILABLE_64}", "energy_j", "unavailable value"),
        ("utilization value 250", "utilization", "250"),
    ],
)
def test_failed_reading_is_none_until_the_next_successful_read(trace, fault, name, reason):
    def value(sample):
        return sample.gauges.get(name) if name == "sm_clock_hz" else getattr(sample, name)

    with trace.reader(Site(cuda_uuid=A)) as reader:
        trace.fault(f"1 {fault}")
        failing = [reader.read() for _ in range(2)]
        trace.fault()
        sample, failures = reader.read()

    for failed, reasons in failing:
        assert (value(failed), list(reasons)) == (None, [name])
        assert reason in reasons[name]
    assert value(sample) is not None
    assert failures == {}


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("memory", ["memory"]),
        ("utilization", ["utilization"]),
        ("power", ["power"]),
        ("energy", []),  # power replaces the energy counter
        ("fields", []),  # older calls replace the call for field values
        ("events", ["Xid errors"]),
        *((call, []) for call in ("limit", "clocks", "temperature", "throttle", "ecc", "gpm", "about")),
    ],
)
def test_call_without_permission_is_not_reported_as_a_failure(trace, call, missing):
    trace.fault(f"1 {call} error {NO_PERMISSION}")

    with trace.reader(Site(cuda_uuid=A)) as reader:
        sample, failures = reader.read()
        device = reader.device

    assert failures == {}
    assert [sentence.partition(":")[0] for sentence in device.not_measured] == missing
    measured = {"memory": sample.memory_bytes, "utilization": sample.utilization, "power": sample.power_w}
    assert [name for name, value in measured.items() if value is None] == [one for one in missing if one in measured]
    assert device.energy_method == ("instant power" if call == "energy" else "counter")


def test_energy_is_listed_as_not_measured_without_counter_and_power(trace):
    trace.write(Gpu(A, "0:01:00", unsupported=("energy", "power", "utilization")))

    with trace.reader(Site(cuda_uuid=A)) as reader:
        sample, failures = reader.read()
        device = reader.device

    assert (device.energy_method, device.power_scope) == (None, None)
    assert [sentence.partition(":")[0] for sentence in device.not_measured] == ["utilization", "power", "energy"]
    assert (sample.utilization, sample.power_w, sample.energy_j, failures) == (None, None, None, {})


def test_counter_that_fails_at_opening_is_read_again(trace):
    trace.fault(f"1 energy error {UNKNOWN_ERROR}")

    with trace.reader(Site(cuda_uuid=A)) as reader:
        _, failures = reader.read()
        trace.fault()
        sample, _ = reader.read()
        device = reader.device

    assert (device.energy_method, list(failures)) == ("counter", ["energy_j"])
    assert sample.energy_j > 0


def test_lost_gpu_is_read_again(trace, reader):
    trace.fault("1 * lost")
    lost, failures = reader.read()
    trace.fault()
    waiting, _ = reader.read()  # a restart of NVML has failed; the next restart is after a second
    reader.pass_time(1.0)
    back, no_failures = reader.read()

    assert (lost.memory_bytes, lost.utilization, lost.power_w, lost.energy_j) == (None, None, None, None)
    assert set(failures) == {"memory_bytes", "utilization", "power_w", "energy_j"}
    assert set(failures.values()) == {"GPU is lost"}
    assert waiting.memory_bytes is None
    assert (back.memory_bytes, no_failures) == (1 * GIB, {})


def test_delay_between_searches_for_a_lost_gpu_increases(trace, reader):
    trace.fault("1 * lost")
    reader.read()  # the first search is immediate; the next searches are after 1, 2, 4, 8 s
    for delay_s in (1.0, 2.0, 4.0):
        reader.pass_time(delay_s)
        reader.read()
    trace.fault()
    reader.pass_time(7.0)
    too_early, _ = reader.read()
    reader.pass_time(1.0)
    back, _ = reader.read()

    assert too_early.memory_bytes is None
    assert back.memory_bytes == 1 * GIB


def test_delay_between_searches_is_reset_after_the_gpu_returns(trace, reader):
    trace.fault("1 * lost")
    for _ in range(4):  # four searches without success: the next delay would be 16 s
        reader.pass_time(60.0)
        reader.read()
    trace.fault()
    reader.pass_time(60.0)
    reader.read()
    trace.fault("1 * lost")
    reader.pass_time(60.0)
    lost, _ = reader.read()
    trace.fault()
    reader.pass_time(1.0)
    back, _ = reader.read()

    assert lost.memory_bytes is None
    assert back.memory_bytes == 1 * GIB


def test_reader_recovers_after_a_driver_reload(trace, reader):
    trace.fault("1 * lost", "init * error 9")
    reader.read()  # NVML is now shut down and does not start
    _, failures = reader.read()
    trace.fault()
    reader.pass_time(1.0)
    sample, _ = reader.read()

    assert set(failures.values()) == {"Uninitialized"}
    assert sample.memory_bytes == 1 * GIB


def test_returned_gpu_is_read_without_new_capability_calls(trace):
    trace.count_calls()
    with trace.reader(Site(cuda_uuid=A)) as reader:
        trace.fault("1 * lost")
        reader.read()
        trace.fault()
        reader.pass_time(1.0)
        before = trace.call_count(reader.pid)
        reader.read()
        calls = trace.call_count(reader.pid) - before

    assert (calls["nvmlInitWithFlags"], calls["nvmlDeviceGetHandleByUUID"]) == (1, 1)
    assert calls["nvmlDeviceGetFieldValues"] == 2  # one failed call and one successful call
    assert not {"nvmlDeviceGetName", "nvmlDeviceIsMigDeviceHandle", "nvmlDeviceGetPowerUsage"} & set(calls)


def test_returned_gpu_is_found_by_its_uuid(trace, reader):
    trace.write(GPU_A, GPU_B, GPU_C)
    trace.fault("1 * lost")  # position 1 is A until NVML restarts, then B
    sample, failures = reader.read()

    assert (sample.memory_bytes, failures) == (1 * GIB, {})


def test_missing_gpu_is_not_read_until_it_is_found_again(trace, reader):
    trace.write(GPU_C, GPU_B)
    trace.fault("1 * lost")
    reader.read()  # NVML restarts without this GPU
    trace.fault()
    sample, failures = reader.read()
    trace.write(GPU_C, GPU_A, GPU_B)
    reader.pass_time(1.0)
    back, _ = reader.read()

    assert sample.memory_bytes is None  # the old handle can now be a handle of another GPU
    assert set(failures.values()) == {"Uninitialized"}
    assert back.memory_bytes == 1 * GIB


def test_all_energy_of_a_gpu_belongs_to_its_only_slice(sliced):
    with sliced.reader(Site(visible_devices=MIG.uuid, cuda_uuid=B)) as reader:  # torch may return the GPU's UUID
        sample, failures = reader.read()
        device = reader.device

    assert (device.key, device.memory_total_bytes, device.energy_method) == (MIG.uuid, 10 * GIB, "counter")
    assert device.energy_note == f"1/1 of {B}'s energy, by number of slices"
    assert any("slice" in sentence for sentence in device.not_measured)
    assert (sample.memory_bytes, sample.utilization, sample.power_w) == (5 * GIB, None, 300.0)
    assert sample.energy_j > 0
    assert failures == {}


@pytest.mark.parametrize(
    "site",
    [
        {"cuda_uuid": MIG.uuid.removeprefix("MIG-")},
        # a whole GPU in MIG mode is measured by its first slice
        {"local_rank": 1},
        {"visible_devices": "1"},
        {"visible_devices": B},
        {"cuda_uuid": B},
        {"cuda_pci_bus_id": GPU_B.bus},
        {"visible_devices": "1", "container_devices": "all"},
        # the slice that a container was given, beside a whole GPU
        {"container_devices": MIG.uuid},
        {"container_devices": MIG.uuid, "visible_devices": "0"},
    ],
)
def test_slice_is_found_by_every_name_of_it_or_of_its_gpu(sliced, site):
    assert device_of(sliced, **site) == (MIG.uuid, 5)


def test_container_is_measured_by_the_slice_that_it_was_given(trace):
    other = Gpu("MIG-eeee0005-0000-5000-8000-000000000005", parent=0, memory=flat(7 * GIB), memory_total=10 * GIB)
    trace.write(GPU_A, Gpu(**vars(MIG) | {"parent": 0}), other)

    assert device_of(trace, container_devices=f"{other.uuid},{MIG.uuid}") == (MIG.uuid, 5), "NVML's order is CUDA's"
    assert device_of(trace, container_devices=other.uuid) == (other.uuid, 7)


def test_gpu_whose_mode_may_not_be_read_is_never_measured_as_a_whole(trace):
    trace.write(GPU_A, Gpu(**vars(MIG) | {"parent": 0}))
    trace.fault(f"0 mig error {NO_PERMISSION}")

    assert device_of(trace, container_devices=MIG.uuid) == (MIG.uuid, 5)
    with pytest.raises(
        DeviceUnavailable, match="is in MIG mode, or may not be read, and no slice is visible: set CUDA"
    ):
        trace.reader(Site(visible_devices="0")).__enter__()


def test_gpu_in_mig_mode_without_a_visible_slice_is_not_measured_as_a_whole(sliced):
    sliced.fault(f"3 * error {NO_PERMISSION}")

    with pytest.raises(
        DeviceUnavailable,
        match=rf"the GPU {B}|{B} is in MIG mode, or may not be read, and no slice is visible: set CUDA",
    ):
        sliced.reader(Site(visible_devices="1")).__enter__()


def test_slice_is_measured_in_a_container_that_may_not_read_its_gpu(sliced):
    sliced.fault(f"2 * error {NO_PERMISSION}")
    with sliced.reader(Site(visible_devices=MIG.uuid)) as reader:
        sample, failures = reader.read()
        missing = [sentence.partition(":")[0] for sentence in reader.device.not_measured]

    assert (sample.memory_bytes, sample.energy_j, sample.power_w, failures) == (5 * GIB, None, None, {})
    assert missing == ["utilization", "power", "energy", "Xid errors"]


def test_closed_reader_returns_failures_and_does_not_open_again(reader):
    reader.close_device()
    reader.close_device()
    sample, failures = reader.read()

    assert sample.memory_bytes is None
    assert set(failures.values()) == {"Uninitialized"}


@pytest.mark.parametrize(
    ("error", "advice"),
    [(4, "may not open the NVIDIA driver"), (9, "driver is not loaded"), (18, "differ in version"), (20, "Memory")],
)
def test_driver_that_does_not_start_raises_an_error_with_advice(trace, error, advice):
    trace.fault(f"init * error {error}")

    with pytest.raises(DeviceUnavailable, match=advice), trace.reader(Site()):
        pass


def run_python(code, *arguments, **environ):
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_missing_library_raises_an_error_with_advice():
    code = """
import pynvml
def fail(name): raise OSError(name)
pynvml.CDLL = fail
from effllm.devices import DeviceUnavailable, Site, open_device
try:
    open_device("nvml", Site())
except DeviceUnavailable as error:
    print(error)
print(open_device("auto", Site()).device.kind)
"""
    sentence, kind = run_python(code).splitlines()

    assert "install the NVIDIA driver" in sentence
    assert kind == "host"


def test_bytes_of_an_old_pynvml_are_decoded(trace):
    code = f"""
import pynvml
for name in ("nvmlDeviceGetUUID", "nvmlDeviceGetName"):
    setattr(pynvml, name, lambda handle, call=getattr(pynvml, name): call(handle).encode())
from effllm.devices import Site, open_device
print(open_device("nvml", Site(visible_devices="0")).device.key == {A!r})
"""
    assert run_python(code, **trace.environment()) == "True\n"
