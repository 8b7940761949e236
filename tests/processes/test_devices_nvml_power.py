"""More readings of a GPU: energy and power by scope, GPM, clocks, events, and shares of MIG slices.

The values follow the curves of the NVML library of the tests. ``frozen`` stops the time of the library, so the values
are exact. NVML truncates values to whole mW and mJ.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import pytest
from nvml_library import GIB, Gpu, flat, sine, square

from effllm.devices import Site

A, B = "GPU-aaaa0001-0000-4000-8000-000000000001", "GPU-bbbb0002-0000-4000-8000-000000000002"
AT_A, AT_B = Site(cuda_uuid=A, host="node0"), Site(cuda_uuid=B, host="node0")
MOMENT_S = 1234.567
NOT_AVAILABLE_32, NOT_AVAILABLE_64 = 2**32 - 1, 2**64 - 1
UNKNOWN_ERROR = 999


def gpu(uuid: str = A, bus: str = "0:01:00", **changes) -> Gpu:
    return Gpu(uuid, bus, **{"power": sine(200.0, 400.0, 1.7), **changes})


def frozen(at_s: float = MOMENT_S) -> str:
    return f"* * freeze {at_s!r}"


def milli(value: float) -> float:
    """Return a value truncated to whole thousandths, as in NVML."""
    return int(1e3 * value) / 1e3


def read_at(trace, site: Site = AT_A, moment_s: float = MOMENT_S, faults=()):
    """Open a device and read it at ``moment_s``; return the device, the sample and the failures."""
    with trace.reader(site) as reader:
        trace.fault(frozen(moment_s), *faults)
        sample, failures = reader.read()
        trace.fault()
        return reader.device, sample, failures


@pytest.fixture
def trace(trace):
    """The trace with the GPU that most tests read."""
    trace.write(gpu())
    return trace


@pytest.fixture
def reader(trace):
    with trace.reader(AT_A) as reader:
        yield reader


# --- energy and power, by scope ---


def test_energy_and_power_are_exact_to_the_millijoule(trace):
    (one,) = trace.write(gpu())

    device, sample, failures = read_at(trace)

    known = (device.energy_method, device.power_scope, device.energy_key, device.energy_note)
    assert known == ("counter", "gpu", "", "")
    assert (sample.energy_j, sample.power_w) == (milli(one.counter_j(MOMENT_S)), milli(one.power_w(MOMENT_S)))
    assert sample.power_average_w == milli(one.power_w(MOMENT_S, "average"))
    assert not {"module_power_w", "memory_power_w"} & set(sample.gauges)
    assert failures == {}


def test_power_of_each_scope_is_a_separate_gauge(trace):
    (one,) = trace.write(gpu(module_power=sine(500.0, 900.0, 2.3), memory_power=sine(30.0, 90.0, 0.7)))

    device, sample, _ = read_at(trace)

    assert (device.power_scope, sample.power_w) == ("gpu", milli(one.power_w(MOMENT_S)))
    assert sample.gauges["module_power_w"] == milli(one.power_w(MOMENT_S, "instant", "module"))
    assert sample.gauges["memory_power_w"] == milli(one.power_w(MOMENT_S, "average", "memory"))


@pytest.mark.parametrize("scope", ["module_power", "memory_power"])
def test_scope_with_the_same_power_as_the_gpu_is_ignored(trace, scope):
    trace.write(gpu(power=flat(300.0), **{scope: flat(300.0)}))

    device, sample, _ = read_at(trace)

    assert device.power_scope == "gpu"
    assert f"{scope}_w" not in sample.gauges


def superchip(**changes) -> list[Gpu]:
    """Return two GPUs of one module; the energy counter of each GPU counts the whole module."""
    module = {"module_power": sine(900.0, 1100.0, 1.1), "energy_scope": "module", "tick_s": 0.1, "serial": "S1"}
    return [gpu(A, **{**module, **changes}), gpu(B, "0:02:00", **{**module, **changes})]


@pytest.mark.parametrize(("scope", "key"), [("module", "module:S1"), ("gpu", "")])
def test_scope_of_a_gpu_is_what_its_counter_measures(trace, scope, key):
    one, _ = trace.write(*superchip(energy_scope=scope))

    device, sample, failures = read_at(trace)

    assert (device.power_scope, device.energy_method, device.energy_key) == (scope, "counter", key)
    assert device.energy_note == ""
    assert sample.energy_j == milli(one.counter_j(MOMENT_S))
    assert sample.power_w == milli(one.power_w(MOMENT_S, "instant", scope))
    assert sample.power_average_w == milli(one.power_w(MOMENT_S, "average", scope))
    assert sample.gauges["module_power_w"] == milli(one.power_w(MOMENT_S, "instant", "module"))
    # NVML's limit is the limit of the GPU. The power of the module may be higher, and the counter is correct then.
    assert (device.power_limit_w, sample.gauges["power_limit_w"]) == (700.0 if scope == "gpu" else None, 700.0)
    assert failures == {}


def test_gpus_of_one_module_share_one_energy_key(trace):
    second = {"module_power": flat(800.0), "energy_scope": "module", "tick_s": 0.05, "serial": "S2"}
    trace.write(*superchip(), *(gpu(f"GPU-{n}", f"0:0{n}:00", **second) for n in (3, 4)))
    keys = [read_at(trace, Site(cuda_uuid=uuid))[0].energy_key for uuid in (A, B, "GPU-3", "GPU-4")]
    # NVML's module ids distinguish GPUs, not modules: on a tray of two superchips the ids are 1 to 4.
    trace.write(*superchip(serial=None, module_id=2))

    assert keys == ["module:S1", "module:S1", "module:S2", "module:S2"]
    assert read_at(trace)[0].energy_key == "module:node0"


def test_failed_module_power_is_not_replaced_by_gpu_power(trace):
    trace.write(*superchip())

    _, sample, failures = read_at(trace, faults=[f"0 power.instant.module error {UNKNOWN_ERROR}"])

    assert sample.power_w is None
    assert sample.energy_j > 0
    assert failures == {"power_w": "Unknown Error"}


def test_failed_field_does_not_affect_other_fields(trace):
    trace.write(gpu(memory_power=flat(40.0)))

    faults = [f"0 power.instant.gpu value {NOT_AVAILABLE_32}", "0 power.average.memory error 999"]
    _, sample, failures = read_at(trace, faults=faults)

    assert sample.power_w is None
    assert sample.energy_j > 0
    assert sample.power_average_w > 0
    assert "memory_power_w" not in sample.gauges
    # A missing gauge is no failure.
    assert failures == {"power_w": "NVML returned 0xffffffff, its mark for an unavailable value"}


def test_32_bit_mark_of_a_missing_value_is_a_valid_64_bit_energy(trace):
    _, sample, failures = read_at(trace, faults=[f"0 energy value {NOT_AVAILABLE_32}"])

    assert sample.energy_j == NOT_AVAILABLE_32 / 1e3
    assert failures == {}


def test_reads_at_edges_return_only_energy_and_power(trace):
    (one,) = trace.write(gpu(memory_power=flat(40.0)))

    with trace.reader(AT_A) as reader:
        trace.fault(frozen())
        sample, failures = reader.call("read_energy")

    assert (sample.energy_j, sample.power_w) == (milli(one.counter_j(MOMENT_S)), milli(one.power_w(MOMENT_S)))
    assert (sample.memory_bytes, sample.utilization, sample.gauges, sample.throttled_by) == (None, None, {}, None)
    assert (sample.power_average_w, sample.energy_only) == (None, True)
    assert failures == {}


# --- older boards and drivers ---


@pytest.mark.parametrize(
    ("name", "usage", "unsupported", "method"),
    [
        ("Tesla T4", "instant", ("power.average",), "counter"),
        ("Tesla V100-SXM2-32GB", "instant", ("fields",), "counter"),
        ("NVIDIA A100-SXM4-80GB", "instant", ("fields",), "counter"),  # GA100 is the exception among Ampere GPUs
        ("NVIDIA A10", "average", ("fields",), "counter"),
        ("NVIDIA H100 80GB HBM3", "average", ("fields",), "counter"),
        ("Tesla P100-PCIE-16GB", "instant", ("fields", "energy"), "instant power"),
        ("NVIDIA A10", "average", ("fields", "energy"), "average power"),
    ],
)
def test_older_nvml_calls_replace_missing_field_values(trace, name, usage, unsupported, method):
    (one,) = trace.write(gpu(name=name, power_usage=usage, unsupported=unsupported))

    device, sample, failures = read_at(trace)

    assert (device.energy_method, device.power_scope) == (method, "gpu")
    assert sample.energy_j == (milli(one.counter_j(MOMENT_S)) if method == "counter" else None)
    power_w = milli(one.power_w(MOMENT_S, usage))
    powers = (sample.power_w, sample.power_average_w)
    assert powers == ((power_w, None) if usage == "instant" else (None, power_w))
    assert failures == {}


OLD_DRIVER = """
import ctypes, pynvml
class Old:
    def __init__(self):
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
    def __getattr__(self, name):
        if name in {missing}:
            raise AttributeError(name)
        return getattr(self.library, name)
pynvml.nvmlLib = Old()
from effllm.devices import Site, open_device
reader = open_device("nvml", Site())
sample, failures = reader.read()
"""


def run_on_old_driver(trace, missing, code):
    """Read once with an NVML that lacks the functions in ``missing``, then run the code; return its printed words."""
    script = OLD_DRIVER.format(missing=set(missing)) + code
    environ = os.environ | trace.environment()
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_older_nvml_functions_are_used_with_an_old_driver(trace):
    missing = ["nvmlDeviceGetFieldValues", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons"]
    missing += ["nvmlGpmQueryDeviceSupport", "nvmlDeviceIsMigDeviceHandle", "nvmlEventSetCreate"]
    trace.write(gpu(power=flat(250.0), memory=flat(3.0 * GIB), memory_reserved=GIB, throttle=0x4))

    output = run_on_old_driver(
        trace,
        missing,
        "print(reader.device.energy_method, sample.power_w, sample.memory_bytes, *sample.throttled_by, failures)",
    )

    # The first version of the memory call counts memory reserved by the driver as used.
    assert output == ["counter", "250.0", str(4.0 * GIB), "power_cap", "{}"]


@pytest.mark.parametrize(
    ("capability", "field"), [((7, 5), "power_w"), ((8, 0), "power_w"), ((8, 6), "power_average_w")]
)
def test_unknown_board_has_the_kind_of_power_of_its_chip(trace, capability, field):
    trace.write(gpu(name="NVIDIA Something New", power=flat(250.0), unsupported=("fields",)))
    patch = f"import pynvml; pynvml.nvmlDeviceGetCudaComputeCapability = lambda handle: {capability}"

    output = run_on_old_driver(trace, [], f"{patch}\nprint(open_device('nvml', Site()).read()[0].{field})")

    assert output == ["250.0"]


# --- memory, clocks, temperature ---


def test_gauges_are_in_base_units(trace):
    trace.write(
        gpu(
            memory=flat(30.0 * GIB),
            memory_reserved=2 * GIB,
            sm_clock_mhz=flat(1755.0),
            memory_clock_mhz=flat(2619.0),
            temperature_c=flat(63.0),
            power_limit_w=650.0,
        )
    )

    device, sample, failures = read_at(trace)

    assert (device.memory_total_bytes, device.power_limit_w) == (80 * GIB, 650.0)
    assert sample.memory_bytes == 30 * GIB
    assert sample.gauges == {
        "sm_clock_hz": 1.755e9,
        "memory_clock_hz": 2.619e9,
        "temperature_c": 63.0,
        "power_limit_w": 650.0,
        "memory_reserved_bytes": 2 * GIB,
    }
    assert failures == {}


@pytest.mark.parametrize(
    ("call", "value", "name"),
    [
        ("clocks.sm", NOT_AVAILABLE_32, "sm_clock_hz"),
        ("clocks.memory", NOT_AVAILABLE_32, "memory_clock_hz"),
        ("temperature", NOT_AVAILABLE_32, "temperature_c"),
        ("temperature", NOT_AVAILABLE_32 - 4, "temperature_c"),  # -5 read as unsigned
    ],
)
def test_impossible_gauge_is_missing_and_reported_as_a_failure(trace, call, value, name):
    _, sample, failures = read_at(trace, faults=[f"0 {call} value {value}"])

    assert list(failures) == [name]
    assert set(sample.gauges) == {
        "sm_clock_hz", "memory_clock_hz", "temperature_c", "power_limit_w", "memory_reserved_bytes",
    } - {name}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "max_mhz", "reference_hz"),
    [
        ("NVIDIA H100 80GB HBM3", 1980.0, pytest.approx(1.83e9, rel=1e-3)),
        ("NVIDIA A100-SXM4-80GB", 1980.0, pytest.approx(1.41e9, rel=1e-3)),
        ("Traced", 1980.0, 1.98e9),
        ("NVIDIA H100 80GB HBM3", None, None),
    ],
)
def test_reference_clock_is_the_clock_of_the_peak_or_else_the_maximum(trace, name, max_mhz, reference_hz):
    trace.write(gpu(name=name, power_limit_w=500.0, power_limit_default_w=700.0, sm_clock_max_mhz=max_mhz))

    device, _, _ = read_at(trace)

    assert (device.power_limit_w, device.power_limit_default_w) == (500.0, 700.0)
    assert device.sm_clock_max_hz == (1.98e9 if max_mhz else None)
    assert device.sm_clock_reference_hz == reference_hz


@pytest.mark.parametrize(
    ("bits", "profiles"), [(None, None), (0, "none"), (1 << 1 | 1 << 20, "MAX_Q, TRAINING"), (1 << 31, "31")]
)
def test_enforced_power_profiles_are_facts_of_a_gpu(trace, bits, profiles):
    trace.write(gpu(power_profiles=bits))

    assert read_at(trace)[0].power_profiles == profiles


def test_missing_values_at_the_opening_of_a_gpu_are_ignored(trace):
    trace.write(gpu(memory_total=NOT_AVAILABLE_64, memory_reserved=NOT_AVAILABLE_64))
    ends = (f"0 ecc value {NOT_AVAILABLE_64}", f"0 memory value {GIB}", f"0 clocks.max value {NOT_AVAILABLE_32}")
    trace.fault(f"0 limit value {NOT_AVAILABLE_32}", *ends)

    with trace.reader(AT_A) as reader:
        device, (sample, failures) = reader.device, reader.read()

    assert (device.memory_total_bytes, device.power_limit_w) == (None, None)
    assert (device.sm_clock_max_hz, device.power_limit_default_w) == (None, None)
    assert not {"power_limit_w", "memory_reserved_bytes"} & set(sample.gauges)
    assert (sample.events, failures) == ((), {})


# --- throttling ---


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0x0, ()),
        (0x1 | 0x2 | 0x100, ()),  # idle, clock set by the user, display clock: no throttling
        (0x4, ("power_cap",)),
        (0x8 | 0x40, ("hw_slowdown", "hw_thermal")),
        (0x8 | 0x80, ("hw_slowdown", "power_brake")),
        (0x10 | 0x20, ("sync_boost", "sw_thermal")),
        (0x4 | 0x1_0000, ("power_cap",)),  # bit 0x10000 is an unknown reason
    ],
)
def test_throttle_reasons_are_returned_by_name(trace, bits, names):
    trace.write(gpu(throttle=bits))

    _, sample, failures = read_at(trace)

    assert sample.throttled_by == names
    assert failures == {}


@pytest.mark.parametrize(
    ("unsupported", "fault", "failing"),
    [
        *(((), f"value {value}", ["throttled_by"]) for value in (NOT_AVAILABLE_32, NOT_AVAILABLE_64)),
        ((), f"error {UNKNOWN_ERROR}", ["throttled_by"]),
        (("throttle",), "delay 0", []),
    ],
)
def test_throttle_reasons_are_none_if_they_cannot_be_read(trace, unsupported, fault, failing):
    trace.write(gpu(throttle=0x4, unsupported=unsupported))

    _, sample, failures = read_at(trace, faults=[f"0 throttle {fault}"])

    assert (sample.throttled_by, list(failures)) == (None, failing)


# --- GPM ---

ACTIVITIES = {
    "sm_activity": sine(0.2, 0.6, 0.9),
    "tensor_activity": sine(0.1, 0.3, 1.3),
    "dram_activity": square(0.0, 0.8, 0.5),
}


def read_twice(trace, reader, first_s, last_s, *faults):
    """Read at two times; return the two samples and all failures."""
    trace.fault(frozen(first_s), *faults)
    first, failures = reader.read()
    time.sleep(0.105)  # the reader needs a minimum time between GPM samples
    trace.fault(frozen(last_s), *faults)
    last, more = reader.read()
    return first, last, failures | more


def test_gpm_activities_are_means_between_two_samples(trace):
    trace.write(gpu(gpm=1, utilization=flat(0.9), **ACTIVITIES))

    with trace.reader(AT_A) as reader:
        first, last, failures = read_twice(trace, reader, 100.0, 101.2)

    assert not [name for name in first.gauges if "activity" in name]
    for name, curve in ACTIVITIES.items():
        assert last.gauges[f"{name}_ratio"] == pytest.approx(curve.mean(100.0, 101.2), rel=1e-12)
    assert (first.utilization, last.utilization) == (0.9, 0.9)  # not affected
    assert failures == {}


def test_time_between_gpm_samples_has_a_minimum(trace):
    trace.write(gpu(gpm=1, **ACTIVITIES))
    trace.count_calls()

    with trace.reader(AT_A) as reader:
        reader.read()
        sample, failures = reader.read()
        calls = trace.call_count(reader.pid)

    assert calls["nvmlGpmSampleGet"] == 1
    assert not [name for name in sample.gauges if "activity" in name]
    assert failures == {}


@pytest.mark.parametrize(
    ("gpm", "fault", "expected", "reason"),
    [
        (0, "", {}, {}),  # a chip before Hopper
        (1, "gpm.metrics value 100.02", {1.0}, {}),
        *((1, f"gpm.metrics value {value}", {}, {}) for value in ("nan", "250", "-1")),
        (1, f"gpm.sample error {UNKNOWN_ERROR}", {}, {"gpm": "Unknown Error"}),
    ],
)
def test_only_possible_activities_are_reported(trace, gpm, fault, expected, reason):
    trace.write(gpu(gpm=gpm, **ACTIVITIES))

    with trace.reader(AT_A) as reader:
        _, last, failures = read_twice(trace, reader, 100.0, 101.0, *([f"0 {fault}"] if fault else []))

    assert {value for name, value in last.gauges.items() if "activity" in name} == set(expected)
    assert (failures, last.gauges["temperature_c"]) == (reason, 50.0)


def test_gpm_means_exclude_the_time_when_the_gpu_is_lost(trace):
    trace.write(gpu(gpm=1, **ACTIVITIES))

    with trace.reader(AT_A) as reader:
        read_twice(trace, reader, 100.0, 101.0)
        trace.fault("0 * lost")
        reader.read()
        reader.pass_time(1.0)
        time.sleep(0.105)
        first, last, failures = read_twice(trace, reader, 200.0, 201.0)

    assert "sm_activity_ratio" not in first.gauges  # no mean from 101 s to 200 s, the time of the loss
    assert last.gauges["sm_activity_ratio"] == pytest.approx(ACTIVITIES["sm_activity"].mean(200.0, 201.0), rel=1e-12)
    assert failures == {}


# --- slices ---

WHOLE = {"power": sine(200.0, 400.0, 1.7), "memory_power": flat(70.0), "gpm": 1}


def part(name: str, instance: int, slices: int | None, gib: int = 10, **changes) -> Gpu:
    return Gpu(f"MIG-{name}", parent=0, instance=instance, slices=slices, memory_total=gib * GIB, **changes)


def test_energy_of_a_gpu_is_divided_among_its_slices(trace):
    one, *_ = trace.write(gpu(**WHOLE), part("a", 1, 3, 40), part("b", 2, 2, 20), part("c", 3, 2, 20))

    device_a, sample_a, _ = read_at(trace, Site(visible_devices="MIG-a"))
    device_b, sample_b, _ = read_at(trace, Site(visible_devices="MIG-b"))

    whole_j, whole_w = milli(one.counter_j(MOMENT_S)), milli(one.power_w(MOMENT_S))
    assert device_a.energy_note == f"3/7 of {A}'s energy, by compute slices"
    assert device_b.energy_note == f"2/7 of {A}'s energy, by compute slices"
    assert sample_a.energy_j == pytest.approx(whole_j * 3 / 7, rel=1e-12)
    assert sample_b.energy_j == pytest.approx(whole_j * 2 / 7, rel=1e-12)
    assert sample_a.power_w + sample_b.power_w == pytest.approx(whole_w * 5 / 7, rel=1e-12)
    assert sample_a.gauges["memory_power_w"] == pytest.approx(70.0 * 3 / 7)
    assert device_a.power_limit_w == sample_a.gauges["power_limit_w"] == pytest.approx(700.0 * 3 / 7)
    assert device_a.power_limit_default_w == pytest.approx(700.0 * 3 / 7)
    assert device_a.sm_clock_max_hz == 1.98e9
    assert (device_a.energy_key, device_a.power_scope, device_a.energy_method) == ("", "gpu", "counter")


@pytest.mark.parametrize(
    ("parts", "shares"),
    [
        pytest.param(
            [
                part("a", 1, 3, 40, compute_slices=2),
                part("b", 1, 3, 40, compute_instance=1, compute_slices=1),
                part("c", 2, 4, 40),
            ],
            ["2/7", "1/7", "4/7"],
            id="compute instances",
        ),
        # Both compute instances belong to one 3g.40gb slice; the other half of the GPU can have invisible slices.
        pytest.param(
            [part("a", 1, 3, 40, compute_slices=2), part("b", 1, 3, 40, compute_slices=1)],
            ["2/7", "1/7"],
            id="shared memory",
        ),
        # Two 3g.40gb slices use all memory, so the seventh compute slice cannot be used.
        pytest.param([part("a", 1, 3, 40), part("b", 2, 3, 40)], ["3/6", "3/6"], id="all memory"),
        pytest.param([part("a", 1, 1, 10)], ["1/7"], id="single visible slice"),
        pytest.param([part("a", 1, 1, 10), part("b", 2, 2, 20)], ["1/7"], id="no permission for other slices"),
        pytest.param([part(name, n, None) for n, name in enumerate("abc")], ["1/3"] * 3, id="unknown sizes"),
    ],
)
def test_share_of_a_slice_follows_from_the_visible_slices(trace, request, parts, shares):
    trace.write(gpu(**WHOLE), *parts)
    trace.fault(*["0 mig error 4"] * ("no permission" in request.node.callspec.id))

    for name, share in zip("abc", shares, strict=False):
        with trace.reader(Site(visible_devices=f"MIG-{name}")) as reader:
            assert reader.device.energy_note.startswith(f"{share} of {A}'s energy, by ")


@pytest.mark.parametrize(("instance", "expected"), [(2, pytest.approx(0.7, rel=1e-12)), (-1, None)])
def test_activities_of_a_slice_are_those_of_its_gpu_instance(trace, instance, expected):
    slices = part("a", 1, 3, sm_activity=flat(0.4)), part("b", instance, 4, sm_activity=flat(0.7))
    trace.write(gpu(**WHOLE, sm_activity=flat(0.9)), *slices)

    with trace.reader(Site(visible_devices="MIG-b")) as reader:
        _, last, failures = read_twice(trace, reader, 100.0, 101.0)

    assert last.gauges.get("sm_activity_ratio") == expected
    assert (last.utilization, failures) == (None, {})


def test_slice_of_a_module_uses_the_power_of_its_gpu(trace):
    one, *_ = trace.write(superchip()[0], part("a", 1, 3, 40), part("b", 2, 4, 40))

    device, sample, _ = read_at(trace, Site(visible_devices="MIG-a"))

    assert (device.power_scope, device.energy_method, device.energy_key) == ("gpu", "instant power", "")
    note = "by compute slices; power is integrated, because the energy counter measures the module"
    assert device.energy_note.endswith(note)
    assert sample.power_w == pytest.approx(milli(one.power_w(MOMENT_S)) * 3 / 7, rel=1e-12)
    assert sample.energy_j is None


def test_slice_gets_its_share_of_the_energy_after_it_returns(trace):
    one, *_ = trace.write(gpu(**WHOLE), part("a", 1, 3, 40, memory=flat(5.0 * GIB)), part("b", 2, 4, 40))

    with trace.reader(Site(visible_devices="MIG-a")) as reader:
        # While the GPU is lost, another GPU is added, and the order of NVML changes.
        moved = part("a", 1, 3, 40, memory=flat(5.0 * GIB))
        trace.write(gpu(B, "0:02:00", power=flat(99.0)), gpu(**WHOLE), Gpu(**vars(moved) | {"parent": 1}))
        trace.fault("0 * lost")
        reader.read()
        reader.pass_time(1.0)
        trace.fault(frozen())
        sample, failures = reader.read()

    assert sample.energy_j == pytest.approx(milli(one.counter_j(MOMENT_S)) * 3 / 7, rel=1e-12)
    assert sample.memory_bytes == 5 * GIB
    assert failures == {}


# --- events ---


def events_of(reader, pass_s: float = 0.0):
    """Advance the reader's clock and read; return the events of the sample."""
    reader.pass_time(pass_s)
    return tuple((event.kind, event.text) for event in reader.read()[0].events)


def test_critical_errors_of_one_number_are_one_event(trace, reader):
    before = events_of(reader)
    trace.fault("0 xid event 79")
    events = [events_of(reader, 1.0) for _ in range(3)]
    trace.fault(*["0 xid event 63"] * 5)
    ((_, repeated),) = events_of(reader, 1.0)

    assert before == ()
    assert events == [(("xid", "Xid 79: a critical error of the GPU, see the driver's log"),), (), ()]
    assert repeated.startswith("Xid 63, 5 times:")


def test_events_of_a_failing_gpu_are_read_immediately(trace, reader):
    events_of(reader)
    trace.fault("0 xid event 79", *(f"0 {call} error {UNKNOWN_ERROR}" for call in ("fields", "memory", "utilization")))
    events = events_of(reader)  # the second read is in the same second

    assert [kind for kind, _ in events] == ["xid"]


def test_events_of_a_returned_gpu_are_read(trace, reader):
    trace.fault("0 * lost")
    reader.read()
    trace.fault()
    events_of(reader, 1.0)
    trace.fault("0 xid event 48")
    events = events_of(reader, 1.0)

    assert [kind for kind, _ in events] == ["xid"]


def test_memory_errors_are_counted_from_the_opening_of_the_gpu(trace):
    trace.write(gpu(ecc_uncorrected=2, ecc_corrected=7))

    with trace.reader(AT_A) as reader:
        before = events_of(reader, 10.0)
        trace.fault("0 ecc.uncorrected value 5")
        events = [events_of(reader, 10.0) for _ in range(2)]
        trace.fault("0 ecc.uncorrected value 0")  # the driver was reloaded
        after = events_of(reader, 10.0)
        trace.fault("0 ecc.uncorrected value 1")
        again = events_of(reader, 10.0)

    assert before == ()
    assert events == [(("ecc", "3 uncorrected memory errors"),), ()]
    assert after == ()
    assert again == (("ecc", "1 uncorrected memory errors"),)


def test_changed_power_limit_is_in_the_gauge_after_ten_seconds(trace):
    with trace.reader(AT_A) as reader:
        trace.fault("0 limit value 350000")
        limits_w = []
        for seconds in (0.0, 10.0, 1.0):
            reader.pass_time(seconds)
            limits_w.append(reader.read()[0].gauges["power_limit_w"])

    assert limits_w == [700.0, 700.0, 350.0]


@pytest.mark.parametrize(
    "fault",
    [
        *(f"{call} error {code}" for call in ("ecc", "limit", "events") for code in (4, UNKNOWN_ERROR)),
        f"ecc value {NOT_AVAILABLE_64}",
        f"limit value {NOT_AVAILABLE_32}",
    ],
)
def test_unreadable_values_raise_no_events(trace, reader, fault):
    trace.fault(f"0 {fault}")
    events = events_of(reader, 10.0)
    trace.fault()
    after = events_of(reader, 10.0)

    assert (events, after) == ((), ())


def test_power_limit_is_read_later_if_it_is_unreadable_at_first(trace):
    trace.fault(f"0 limit error {UNKNOWN_ERROR}")

    with trace.reader(AT_A) as reader:
        trace.fault()
        reader.pass_time(10.0)
        reader.read()
        second, _ = reader.read()

    assert second.gauges["power_limit_w"] == 700.0


# --- cost ---


def calls_of(trace, site: Site, *methods: str) -> list[Counter]:
    """Return the NVML calls of each method call of a reader."""
    trace.count_calls()
    with trace.reader(site) as reader:
        counts = [trace.call_count(reader.pid)]
        for method in methods:
            reader.call(method)
            counts.append(trace.call_count(reader.pid))
    return [after - before for before, after in pairwise(counts)]


PLAIN = Counter({
    "nvmlDeviceGetFieldValues": 1, "nvmlDeviceGetMemoryInfo_v2": 1, "nvmlDeviceGetUtilizationRates": 1,
    "nvmlDeviceGetClockInfo": 2, "nvmlDeviceGetTemperature": 1, "nvmlDeviceGetCurrentClocksEventReasons": 1,
})  # fmt: skip


def test_read_makes_one_batched_call_and_six_single_calls(trace):
    trace.write(gpu(module_power=sine(500.0, 900.0, 2.3), memory_power=flat(70.0)))

    first, second = calls_of(trace, AT_A, "read", "read")

    assert first == PLAIN + Counter({"nvmlEventSetWait_v2": 1})
    assert second == PLAIN


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"memory_power": flat(70.0), "gpm": 1}, ["nvmlDeviceGetFieldValues"]),
        ({"unsupported": ("fields",)}, ["nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"]),
    ],
)
def test_read_at_an_edge_makes_one_call_or_two_without_field_values(trace, changes, expected):
    trace.write(gpu(**changes))

    assert calls_of(trace, AT_A, "read_energy") == [Counter(expected)]


def test_gpm_metrics_need_two_more_nvml_calls_per_read(trace):
    trace.write(gpu(gpm=1, **ACTIVITIES))
    trace.count_calls()

    with trace.reader(AT_A) as reader:
        reader.read()
        time.sleep(0.105)
        before = trace.call_count(reader.pid)
        reader.read()
        calls = trace.call_count(reader.pid) - before

    assert calls == PLAIN + Counter({"nvmlGpmSampleGet": 1, "nvmlGpmMetricsGet": 1})


def test_power_limit_and_memory_errors_are_read_every_ten_seconds(trace):
    trace.count_calls()

    with trace.reader(AT_A) as reader:
        before = trace.call_count(reader.pid)
        for _ in range(21):
            reader.read()
            reader.pass_time(1.0)
        calls = trace.call_count(reader.pid) - before

    assert (calls["nvmlDeviceGetEnforcedPowerLimit"], calls["nvmlDeviceGetTotalEccErrors"]) == (2, 2)
    assert calls["nvmlEventSetWait_v2"] == 21


def test_gauges_and_events_of_a_lost_gpu_are_not_read(trace):
    trace.write(gpu(gpm=1, **ACTIVITIES))
    trace.count_calls()

    with trace.reader(AT_A) as reader:
        trace.fault("0 * lost")
        reader.read()
        before = trace.call_count(reader.pid)
        reader.read()  # the search for the GPU has failed immediately before
        calls = trace.call_count(reader.pid) - before

    assert set(calls) <= {"nvmlDeviceGetFieldValues", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates"}


def test_reads_make_no_slow_nvml_calls(trace):
    trace.write(gpu(gpm=1, **ACTIVITIES), part("a", 1, 3))

    calls = sum(calls_of(trace, AT_A, "read", "read", "read_energy"), Counter())

    for word in ("Processes", "PcieThroughput", "FanSpeed", "Samples", "Init", "Handle", "Name", "UUID"):
        assert not [name for name in calls if word in name], word
