"""effllm/devices/amd.py with a fake amdsmi whose true values are known; these tests do not use an AMD GPU."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import cases
from fake_reader import Clock

from effllm import devices
from effllm.agent.gpu_energy import GpuEnergy
from effllm.devices import DeviceUnavailable, Site, _amd_readings, device_names, nvml, open_named_or_any_gpu
from effllm.devices import open_device as open_named
from effllm.devices.amd import CounterReading, judge_counter, open_device
from effllm.records.rank import AVERAGE, COUNTER, GAUGES, GPU, INSTANT, MODULE

LIBRARY = Path(__file__).parents[1] / "amdsmi_library"
LOOP = "loop.py"
GIB = 2**30
#: The library uses 15.3 uJ instead of 2^-16 J = 15.2588 uJ, so its energy is 0.27 % too high.
HIGH = 15.3e-6 * 2**16

# A, B, C is the order of AMD SMI. The order of HIP is B, C, A; the order on the PCI bus is C, A, B.
A = {"serial": 0xA, "bdf": "0000:5e:00.0", "hip_id": 2, "memory_used": 1 * GIB}
B = {"serial": 0xB, "bdf": "0000:c1:00.0", "hip_id": 0, "memory_used": 2 * GIB}
C = {"serial": 0xC, "bdf": "0000:3b:00.0", "hip_id": 1, "memory_used": 3 * GIB}
KEY_A, KEY_B, KEY_C = (f"GPU-000000000000000{digit}" for digit in "abc")

IO_ERROR, NOT_SUPPORTED, NO_PERMISSION, RETRY, TIMEOUT, NOT_LOADED = 12, 2, 10, 9, 8, 34
RELEASES = [(6, 2), (6, 3), (7, 0)]

FIELDS = {
    "memory_bytes": "amdsmi_get_gpu_memory_usage",
    "utilization": "amdsmi_get_gpu_activity",
    "power_w": "amdsmi_get_power_info",
    "energy_j": "amdsmi_get_energy_count",
    "temperature_c": "amdsmi_get_temp_metric",
    "sm_clock_hz": "amdsmi_get_clock_info",
    "power_limit_w": "amdsmi_get_power_cap_info",
}


class Library:
    """The fake amdsmi in this process, with the test's clock."""

    def __init__(self, path):
        self.path = path
        self.clock = Clock()
        self.script = {"release": [7, 0], "gpus": [A, B, C], "faults": []}
        self.module = None
        self._readers = []
        self.write()

    def write(self, **changes):
        if changes.get("release", self.script["release"]) != self.script["release"]:
            unload_amdsmi()
        self.script |= changes
        self.path.write_text(json.dumps(self.script))

    def fault(self, *faults):
        names = ("call", "error", "gpu")
        self.write(faults=[dict(zip(names, fault, strict=False)) for fault in faults])

    def open(self, **site):
        if "amdsmi" not in sys.modules:
            self.module = importlib.import_module("amdsmi")
            self.module.now = self.clock
        reader = open_device(Site(**{"host": "node7", **site}), clock=self.clock, sleep=self.clock.sleep)
        self._readers.append(reader)
        return reader

    def of(self, release=(7, 0), **gpu):
        """Open the only GPU of a machine."""
        self.write(release=release, gpus=[gpu])
        return self.open()

    def close(self):
        for reader in self._readers:
            reader.close()


def unload_amdsmi():
    for name in [name for name in sys.modules if name.split(".")[0] == "amdsmi"]:
        del sys.modules[name]


@pytest.fixture
def no_nodes(monkeypatch, tmp_path):
    """An empty folder in place of /dev."""
    monkeypatch.setattr(_amd_readings, "_DEVICE_NODES", tmp_path)
    return tmp_path


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(LIBRARY))
    monkeypatch.setenv("AMDSMI_SCRIPT", str(tmp_path / "script.json"))
    unload_amdsmi()
    library = Library(tmp_path / "script.json")
    yield library
    library.close()
    unload_amdsmi()


# --- which GPU ---


def device_of(library, **site):
    """Return the key and the used memory (GiB) of the opened device; each of these values identifies the GPU."""
    reader = library.open(**site)
    sample, failures = reader.read()
    assert not failures
    return reader.device.key, sample.memory_bytes / GIB


@cases(
    ("visible", "local_rank", "expected"),
    [
        (None, 0, (KEY_B, 2)),
        (None, 3, None),
        ("-1", 0, None),
        ("0,1", 2, None),
        ("2,0,1", 0, (KEY_A, 1)),
        ("1", 2, (KEY_C, 3)),  # the launcher makes one GPU visible to each rank
        (f"{KEY_C},{KEY_A}", 1, (KEY_A, 1)),
        (f" {KEY_B.upper()} , 2 ", 1, (KEY_A, 1)),
        ("1,99,0", 0, (KEY_C, 3)),
        ("1,99,0", 1, None),
    ],
)
def test_visible_devices_in_any_order_select_the_correct_gpu(library, visible, local_rank, expected):
    if expected:
        assert device_of(library, visible_devices=visible, local_rank=local_rank) == expected
    else:
        with pytest.raises(DeviceUnavailable, match=f"local rank {local_rank} has no GPU"):
            library.open(visible_devices=visible, local_rank=local_rank)


@pytest.mark.parametrize(
    ("release", "order"),
    [
        ((7, 0), [KEY_B, KEY_C, KEY_A]),  # HIP's own numbers
        ((6, 3), [KEY_B, KEY_C, KEY_A]),  # the node numbers of the driver, from which HIP derives its order
        ((6, 2), [KEY_C, KEY_A, KEY_B]),  # HIP's and the driver's numbers are unknown, so GPUs have PCI bus order
    ],
)
def test_gpus_are_numbered_as_in_hip_and_not_as_in_amd_smi(library, release, order):
    library.write(release=release)

    assert [device_of(library, local_rank=rank)[0] for rank in range(3)] == order


@cases(
    ("site", "expected"),
    [
        ({"cuda_pci_bus_id": "00000000:5E:00.0"}, (KEY_A, 1)),
        ({"cuda_pci_bus_id": "0000:5e:00.0"}, (KEY_A, 1)),
        ({"cuda_uuid": "30303030-3030-3030-3030-303030303063"}, (KEY_C, 3)),  # torch's form of HIP's 16 letters
        ({"cuda_uuid": "GPU-000000000000000c"}, (KEY_C, 3)),
        ({"cuda_uuid": "00ff74a1-0000-1000-8000-00000000000c"}, (KEY_C, 3)),  # AMD SMI's own
    ],
)
def test_identity_of_torch_is_found_in_every_spelling(library, site, expected):
    assert device_of(library, **site, visible_devices="0,1", local_rank=1) == expected


@pytest.mark.parametrize("site", [{"cuda_uuid": "GPU-gone"}, {"cuda_pci_bus_id": "00000000:01:00.0"}])
def test_gpu_of_torch_that_is_not_found_raises_an_error(library, site):
    with pytest.raises(DeviceUnavailable, match="does not list the GPU"):
        library.open(**site)


def test_hidden_gpu_is_not_counted_in_visible_devices(library):
    library.fault(("amdsmi_get_gpu_device_bdf", NO_PERMISSION, 1))  # B is hidden, as in a container with A and C

    assert device_of(library, visible_devices="0") == (KEY_C, 3)


@pytest.mark.parametrize("release", [(6, 2), (7, 0)])
@pytest.mark.parametrize("serial", [None, 0])
def test_gpus_without_a_serial_are_distinguished_by_pci_bus(library, release, serial):
    library.write(gpus=[A | {"serial": serial}, B | {"serial": serial}], release=release)

    found = {device_of(library, local_rank=rank) for rank in (0, 1)}

    assert found == {("node7-0000:5e:00.0", 1), ("node7-0000:c1:00.0", 2)}


def test_partitions_of_a_gpu_share_one_device_key(library):
    partitions = [A | {"bdf": f"0000:5e:00.{function}", "hip_id": function} for function in (0, 1, 2)]
    partitions[1] |= {"serial": None}  # since 7.12 AMD SMI returns a serial only for the first partition
    library.write(gpus=[partitions[1], partitions[0], partitions[2], B | {"hip_id": 3}])

    assert [device_of(library, local_rank=rank)[0] for rank in range(4)] == [KEY_A, KEY_A, KEY_A, KEY_B]


# --- readings ---


@pytest.mark.parametrize("release", RELEASES)
def test_sample_is_in_base_units_for_every_release(library, release):
    reader = library.of(release, power_kind="current")
    library.clock.now_s = 2000.25
    first, failures = reader.read()
    library.clock.now_s += 10
    second, _ = reader.read()

    assert failures == {}
    assert first.time_ns == 2_000_250_000_000
    assert (first.memory_bytes, first.utilization) == (48 * GIB, 0.75)
    assert (first.power_w, first.power_average_w) == (400.0, None)
    assert second.energy_j - first.energy_j == pytest.approx(400 * 10 * HIGH, abs=1e-3)
    assert first.gauges == {
        "temperature_c": 65.0,
        "sm_clock_hz": 2.1e9,
        "memory_clock_hz": 1.3e9,
        "power_limit_w": 750.0,
        "dram_activity_ratio": 0.4,
    }
    assert first.gauges.keys() <= GAUGES.keys()


@pytest.mark.parametrize("kind", ["current", "average"])
def test_read_of_energy_alone_makes_two_library_calls(library, kind):
    reader = library.of(power_kind=kind)
    every = [*FIELDS.values(), "amdsmi_get_gpu_metrics_info"]
    library.fault(*[(call, IO_ERROR) for call in every if "energy" not in call and "power_info" not in call])
    sample, failures = reader.read_energy()

    assert (sample.energy_only, failures) == (True, {})
    assert (sample.power_w if kind == "current" else sample.power_average_w) == 400.0
    assert sample.energy_j > 0
    assert sample.time_ns == round(library.clock() * 1e9)


@pytest.mark.parametrize("release", RELEASES)
def test_name_key_and_limits_of_a_device_are_read(library, release):
    reader = library.of(release, serial=0x1234567890ABCDEF, power_kind="average")
    device = reader.device

    assert (device.key, device.name) == ("GPU-1234567890abcdef", "AMD Instinct MI300X")
    assert (device.kind, device.is_gpu, device.shared, device.simulated) == ("amd", True, False, False)
    assert (device.memory_total_bytes, device.power_limit_w) == (192 * GIB, 750.0)
    assert (device.power_limit_default_w, device.sm_clock_max_hz, device.sm_clock_reference_hz) == (750.0, 2.1e9, 2.1e9)
    assert (device.energy_method, device.power_scope) == (COUNTER, GPU)
    assert (device.energy_key, device.energy_note, device.not_measured) == ("", "", ())
    library_version = {(6, 3): "24.24.3.0", (7, 0): "25.0.0"}.get(release, "AMD SMI 24.24.")
    assert library_version in device.driver
    assert device.driver.startswith("amdgpu 6.10.5, AMD SMI")


@cases("release", [(6, 2), (7, 0)])
@cases(
    ("no_value", "gone"),
    [
        ("gfx_activity", "utilization"),
        ("umc_activity", "dram_activity_ratio"),
        ("current_socket_power", "power_w"),
        ("memory_used", "memory_bytes"),
        ("gfx_clock", "sm_clock_hz"),
        ("energy_accumulator", "energy_j"),
    ],
)
def test_missing_value_is_none_and_not_reported_as_a_failure(library, release, no_value, gone):
    sample, failures = library.of(release, no_value=[no_value]).read()

    assert getattr(sample, gone, None) is None
    assert gone not in sample.gauges
    assert failures == {}


def test_activities_that_mean_something_else_are_not_reported(library):
    before_mi300, _ = library.of(name="AMD Instinct MI210").read()
    reader = library.of()
    library.write(gpus=[{"gfx_activity": 250}])
    above_one, failures = reader.read()

    assert (before_mi300.utilization, "dram_activity_ratio" in before_mi300.gauges) == (0.75, False)
    assert (above_one.utilization, failures) == (None, {"utilization": "AMD SMI gave no value"})


def test_device_lists_values_that_are_not_measured(library):
    lacking = ["memory_usage", "activity"]
    gpu = {"lacking": [f"amdsmi_get_gpu_{name}" for name in lacking] + ["amdsmi_get_power_info"]}
    device = library.of(no_value=["energy_accumulator"], **gpu).device

    what, why = zip(*(sentence.split(": ", 1) for sentence in device.not_measured), strict=True)
    assert what == ("memory", "utilization", "power", "energy")
    assert "AMD SMI gives no power" in why[-1]
    assert (device.energy_method, device.power_scope) == (None, None)


@cases("field", FIELDS)
@cases("error", [IO_ERROR, RETRY, TIMEOUT])
def test_failed_reading_is_none_until_the_next_successful_read(library, field, error):
    reader = library.of()
    library.fault((FIELDS[field], error))
    failing = [reader.read() for _ in range(2)]
    library.fault()
    sample, failures = reader.read()

    def value(sample):
        return sample.gauges.get(field, getattr(sample, field, None))

    reason = {IO_ERROR: "AMDSMI_STATUS_IO - I/O Error", RETRY: "RETRY - Retry", TIMEOUT: "TIMEOUT - Timeout"}[error]
    for failed, reasons in failing:
        assert value(failed) is None
        assert reason in reasons[field]
        assert failed.memory_bytes or failed.power_w  # other values of the sample are still measured
    assert value(sample) > 0
    assert failures == {}


@cases("call", ["*", *FIELDS.values(), "amdsmi_get_gpu_metrics_info"])
@cases("error", [NOT_SUPPORTED, NO_PERMISSION, IO_ERROR, RETRY, 0xFFFFFFFF])
@cases("release", [(6, 2), (7, 0)])
def test_read_never_raises(library, release, call, error):
    reader = library.of(release)
    library.fault((call, error))

    sample, _ = reader.read()
    library.fault()

    assert sample.time_ns > 0


# --- throttling ---


def test_growing_residency_of_a_limit_is_reported_as_throttling(library):
    reader = library.of(residencies={"ppt": 0.5, "vr_thm": 0.4, "hbm_thm": 0.0})
    then_s = library.clock()
    first, _ = reader.read()
    library.clock.sleep(1.0)
    over = 0.4 * then_s / library.clock()  # this limit was active before the first read, but not after it
    library.write(gpus=[{"residencies": {"ppt": 0.5, "vr_thm": over, "hbm_thm": 0.0}}])
    second, failures = reader.read()

    assert first.throttled_by is None  # there is no earlier read for a comparison
    assert second.throttled_by == ("power_cap",)
    assert failures == {}


@pytest.mark.parametrize("release", [(6, 2), (7, 0)])
@pytest.mark.parametrize(("throttled", "expected"), [(True, ("unspecified",)), (False, ()), (None, None)])
def test_throttling_before_mi300_is_reported_without_a_reason(library, release, throttled, expected):
    sample, failures = library.of(release, throttled=throttled).read()

    assert (sample.throttled_by, failures) == (expected, {})


def test_unreadable_throttle_limits_are_reported_as_a_failure(library):
    reader = library.of(residencies={"ppt": 0.5})
    library.fault(("amdsmi_get_gpu_metrics_info", IO_ERROR))
    sample, failures = reader.read()

    assert sample.throttled_by is None
    assert list(failures) == ["throttled_by"]


# --- the check of the counter ---


def readings(joules, watts):
    return [CounterReading(0.1 * i, energy_j, watts) for i, energy_j in enumerate(joules)]


@cases(
    ("watts", "joules", "is_good", "reason"),
    [
        # 100 W for 0.1 s are 10 J. From the first change of the counter to the last one, 0.3 s, the energy from power
        # is 30 J. The tolerance is 25 % (7.5 J) plus 0.5 W for 0.3 s (0.15 J).
        (100.0, [0, 10, 20, 30, 40], True, ""),
        (100.0, [0, 12.5, 25, 37.5, 50], True, ""),
        (100.0, [0, 7.5, 15, 22.5, 30], True, ""),
        (100.0, [0, 7.4, 14.8, 22.2, 29.6], False, "a count of 22.2 J"),
        (100.0, [5, 5, 5, 5, 5], False, "no change in 0.4 s"),
        (100.0, [5, 5, 6, 6, 6], False, "one change in 0.4 s"),
        (100.0, [0, 10, 20, 19, 30], False, "a decrease of 1 J"),
        (100.0, [0, None, None, None, 40], False, "too few readings"),
        # Three changes with a tick of 0.2 s: 40 J from the first change to the last one, for every phase of the tick.
        (100.0, [0, 20, 20, 40, 40, 60, 60], True, ""),
        # 2 W for 0.3 s are 0.6 J. The tolerance is 25 % (0.15 J) plus half a watt of rounding (0.15 J).
        (2.0, [0, 0.29, 0.58, 0.87, 1.16], True, ""),
        (2.0, [0, 0.31, 0.62, 0.93, 1.24], False, "a count of 0.93 J"),
        (None, [0, 10, 20, 30], True, "no power reading for the comparison"),
    ],
)
def test_counter_is_accepted_if_it_matches_the_power(watts, joules, is_good, reason):
    verdict = judge_counter(readings(joules, watts))

    assert verdict.is_good is is_good
    assert verdict.reason.startswith(reason)


@cases(("rate", "why"), [(0.01, "a count of"), (100.0, "a count of"), (0.0, "no change"), (-1.0, "a decrease of")])
@cases(("kind", "method", "field"), [("current", INSTANT, "power_w"), ("average", AVERAGE, "power_average_w")])
def test_power_is_integrated_if_the_counter_has_a_wrong_rate(library, rate, why, kind, method, field):
    reader = library.of(rate=rate, power_kind=kind)
    sample, failures = reader.read()
    device = reader.device

    assert (device.energy_method, device.power_scope) == (method, GPU)
    assert device.energy_note.startswith(f"power is integrated, because the energy counter is not used: {why}")
    assert (sample.energy_j, getattr(sample, field), failures) == (None, 400.0, {})
    assert device.not_measured == ()


def test_counter_is_used_with_a_note_if_power_is_missing(library):
    device = library.of(lacking=["amdsmi_get_power_info"]).device

    assert device.energy_method == COUNTER
    assert device.energy_note == "the energy counter is not checked: no power reading for the comparison"


def test_power_is_integrated_if_the_counter_is_missing(library):
    reader = library.of(no_value=["energy_accumulator"])
    began_s = library.clock()

    assert reader.device.energy_method == INSTANT
    assert reader.device.energy_note.endswith("is not used: no counter found")
    assert library.clock() == began_s  # no time passes, because there is no counter to check


def test_library_with_other_units_is_refused(library):
    with pytest.raises(DeviceUnavailable, match=r"install that of ROCm 6.2 or later"):
        library.of((6, 1))


@cases("power", [[400.0, 0.0, 1.0], [400.0, 300.0, 0.7], [40.0, 0.0, 1.0]])
@cases("tick_s", [0.0, 0.01, 0.05, 0.1])
def test_correct_counter_is_accepted_for_every_tick_and_load(library, power, tick_s):
    device = library.of(power=power, tick_s=tick_s).device

    assert (device.energy_method, device.energy_note) == (COUNTER, "")


# --- cards of two dies ---

CARD_1 = [
    {"name": "AMD Instinct MI250X", "device_id": 0x7408, "power_kind": "average", "serial": 0x11, "hip_id": 0},
    {"name": "AMD Instinct MI250X", "device_id": 0x7408, "power_kind": "average", "serial": 0x12, "hip_id": 1},
]
CARD_1[0] |= {"bdf": "0000:c1:00.0", "max_bandwidth": {"1": 200_000}}
CARD_1[1] |= {"bdf": "0000:c6:00.0", "max_bandwidth": {"0": 200_000}, "second_die": True}
FIRST, SECOND = "GPU-0000000000000011", "GPU-0000000000000012"


@pytest.mark.parametrize("release", [(6, 2), (7, 0)])
def test_two_dies_of_a_card_share_one_energy_key(library, release):
    library.write(gpus=CARD_1, release=release)
    first, second = library.open(local_rank=0), library.open(local_rank=1)
    (one, _), (other, failures) = first.read(), second.read()

    assert (first.device.key, second.device.key) == (FIRST, SECOND)
    assert first.device.energy_key == second.device.energy_key == FIRST
    assert (first.device.energy_method, first.device.power_scope) == (
        COUNTER,
        GPU,
    )  # scope "module" would include a CPU
    assert first.device.energy_note == "energy of both dies of the card"
    assert (one.power_average_w, one.energy_j > 0) == (400.0, True)
    assert (second.device.energy_method, second.device.power_scope) == (None, None)
    assert (other.power_average_w, other.power_w, other.energy_j, failures) == (None, None, None, {})
    assert other.memory_bytes == 48 * GIB  # the second die has its own values except energy and power
    assert second.device.not_measured[-1] == (
        f"energy: this is the second die of its card; the first die, {FIRST}, reports the energy of both dies"
    )
    assert second.device.power_limit_w is None


def test_card_of_a_die_is_found_by_its_links_and_not_by_the_bus(library):
    # On the bus, the second die of card 2 is next to the first die of card 1 and not next to the first die of card 2.
    other = [CARD_1[0] | {"serial": 0x21, "bdf": "0000:d6:00.0"}, CARD_1[1] | {"serial": 0x22, "bdf": "0000:c2:00.0"}]
    other[1] |= {"max_bandwidth": {"0": 100_000, "1": 200_000}}
    library.write(gpus=[CARD_1[0], *other])

    device = library.open(cuda_pci_bus_id="0000:c2:00.0").device

    assert device.energy_key == "GPU-0000000000000021"


@pytest.mark.parametrize("max_bandwidth", [{"1": 100_000}, {}])
def test_second_die_measures_no_energy_if_its_first_die_is_hidden(library, max_bandwidth):
    # The only other visible die belongs to another card. In one case the links show this; in the other case both dies
    # are second dies.
    other_card = CARD_1[1] | {"serial": 0x22, "bdf": "0000:c2:00.0", "max_bandwidth": {}}
    library.write(gpus=[CARD_1[1] | {"max_bandwidth": max_bandwidth}, other_card])

    device = library.open(cuda_pci_bus_id="0000:c6:00.0").device

    assert (device.energy_key, device.energy_method) == ("", None)
    assert "not visible here" in device.not_measured[-1]


def test_first_dies_of_two_cards_have_different_energy_keys(library):
    library.write(gpus=[CARD_1[0], CARD_1[0] | {"serial": 0x21, "bdf": "0000:c9:00.0", "hip_id": 1}])

    keys = [library.open(local_rank=rank).device.energy_key for rank in (0, 1)]

    assert keys == [FIRST, "GPU-0000000000000021"]


@cases("release", [(6, 2), (7, 0)])
@cases(
    ("gpu", "scope", "note"),
    [
        ({"name": "", "device_id": 0x7408, "power_kind": "average"}, GPU, "energy of both dies of the card"),
        ({"name": "", "device_id": 0x74A0}, MODULE, ""),
        ({"name": "AMD Instinct MI210", "device_id": 0x740F, "power_kind": "average"}, GPU, ""),
    ],
)
def test_scope_of_energy_follows_from_the_model_or_its_id(library, release, gpu, scope, note):
    device = library.of(release, **gpu).device

    assert (device.power_scope, device.energy_note) == (scope, note)
    assert device.energy_key == (device.key if note else "")


# --- loss ---

LOST = ("*", IO_ERROR, 0)


def test_every_read_of_a_lost_gpu_fails(library):
    reader = library.of()
    library.fault(LOST)
    lost, failures = reader.read()

    assert (lost.memory_bytes, lost.utilization, lost.power_w, lost.energy_j) == (None, None, None, None)
    assert failures.keys() >= {"memory_bytes", "utilization", "power_w", "energy_j", "temperature_c"}
    assert set(failures.values()) == {"AMDSMI_STATUS_IO - I/O Error"}


# --- no GPU ---


@cases(
    ("error", "advice"),
    [
        (NO_PERMISSION, r"/dev/kfd and /dev/dri \(groups render and video\)"),
        (NOT_LOADED, "amdgpu driver is not loaded"),
        (18, "AMD SMI does not start: AMDSMI_STATUS_INIT_ERROR - Initialization error"),
    ],
)
def test_library_that_does_not_start_raises_an_error_in_one_sentence(library, no_nodes, error, advice):
    library.fault(("amdsmi_init", error))

    with pytest.raises(DeviceUnavailable, match=advice) as raised:
        library.open()
    assert "\n" not in str(raised.value)


def test_missing_gpu_raises_an_error_in_one_sentence(library, no_nodes):
    library.write(gpus=[])

    with pytest.raises(DeviceUnavailable, match="AMD SMI lists no GPU: give the container /dev/kfd and /dev/dri"):
        library.open()
    assert library.module._state["references"] == 0


@pytest.mark.parametrize("denied", ["kfd", "dri/renderD128"])
def test_device_node_without_permission_is_reported_as_the_reason(library, monkeypatch, no_nodes, denied):
    (no_nodes / "dri").mkdir()
    for name in ("kfd", "dri/renderD128"):
        (no_nodes / name).touch()
    # root may open all nodes
    monkeypatch.setattr(_amd_readings.os, "access", lambda path, mode: Path(path) != no_nodes / denied)
    library.write(gpus=[])

    with pytest.raises(DeviceUnavailable, match="groups render and video"):
        library.open()


def test_missing_package_raises_an_error_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)

    with pytest.raises(DeviceUnavailable, match="the Python package amdsmi is not installed: install"):
        open_named("amd", Site())


@pytest.mark.parametrize("error", ["KeyError", "AttributeError", "OSError"])
def test_missing_library_of_a_package_raises_an_error_in_one_sentence(library, capfd, error):
    library.write(import_error=error)

    with pytest.raises(DeviceUnavailable, match=r"cannot use libamd_smi.so .* install ROCm's amd-smi-lib"):
        open_named("amd", Site())
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def no_nvidia(monkeypatch):
    def open_device(_site):
        raise DeviceUnavailable("libnvidia-ml.so.1 is missing")

    monkeypatch.setattr(nvml, "open_device", open_device)
    monkeypatch.setattr(devices, "_DRIVER_NODES", {"nvml": ("/nonexistent",), "amd": ("/nonexistent",)})


def test_device_auto_finds_an_amd_gpu(library, no_nvidia):
    reader = open_named("auto", Site())
    reader.close()

    assert (reader.device.kind, reader.device.key) == ("amd", KEY_B)


def test_device_auto_reports_an_amd_gpu_that_it_cannot_read(monkeypatch, no_nvidia, tmp_path):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    without_driver = open_named("auto", Site()).device
    monkeypatch.setitem(devices._DRIVER_NODES, "amd", (tmp_path,))  # the driver is loaded
    with_driver = open_named("auto", Site()).device

    assert (without_driver.kind, with_driver.kind) == ("host", "host")
    assert not [text for text in without_driver.not_measured if "amdsmi" in text]
    assert with_driver.not_measured[-1].startswith("GPU: the Python package amdsmi is not installed")
    with pytest.raises(DeviceUnavailable, match="amdsmi"):
        open_named_or_any_gpu("auto", Site())


def test_watch_measures_amd_gpus_by_default(library, no_nvidia):
    gpus = GpuEnergy("auto", {}, 0.1)
    gpus.start_samplers()
    count = gpus.num_gpus
    gpus.close()

    assert count == 3


def test_device_is_listed_without_importing_amdsmi():
    code = "import effllm.devices.amd, sys; print('amdsmi' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "amd" in device_names()
    assert done.stdout == "False\n"


# --- a whole job ---


def train(launch, script, gpu, **settings):
    script.write_text(json.dumps({"release": [7, 0], "gpus": [gpu]}))
    others = os.environ.get("PYTHONPATH", "")
    environ = {
        "PYTHONPATH": f"{LIBRARY}{os.pathsep}{others}" if others else str(LIBRARY),
        "AMDSMI_SCRIPT": str(script),
        "XDG_CACHE_HOME": str(script.parent / "cache"),  # no calibration of an earlier run is used
    }
    # The loop is longer than the calibration, which takes two seconds after the first iteration.
    return launch.python(LOOP, "--iterations", 350, environ=environ, device="amd", **settings).done()


@pytest.mark.parametrize(("rate", "method"), [(1.0, COUNTER), (0.01, INSTANT)])
def test_job_on_an_amd_gpu_reports_the_true_power(launch, library, tmp_path, rate, method):
    gpu = {"serial": 0xA, "power": [400.0, 100.0, 1.3], "gfx_activity": 25, "rate": rate}
    job = train(launch, tmp_path / "job.json", gpu)
    ledger, summary = job.ledger, job.ledger.summary
    start_s, end_s = job.output()["steps"][0][0], job.output()["steps"][-1][1]
    fake = importlib.import_module("amdsmi")
    truth_w = fake.energy_j(fake.GPU | gpu, start_s, end_s) / (end_s - start_s)

    assert {row.device for row in ledger.ranks} == {KEY_A}
    assert [device["kind"] for device in ledger.facts["ranks"]["0"]["devices"]] == ["amd"]
    assert summary.metrics["aec_watts"].value == pytest.approx(truth_w, rel=0.05)
    assert summary.metrics["pcu_ratio"].value == pytest.approx(0.25, abs=1e-6)
    assert summary.metrics["amu_gb"].value == pytest.approx(48.0, abs=1e-6)
    assert (summary.energy.scope, summary.energy.method) == (GPU, method)
    assert set(summary.energy.by_device) == {KEY_A}
    assert (summary.coverage.gpus_measured, summary.coverage.gpus_expected) == (1, 1)


@cases(
    ("rocr", "hip", "cuda", "expected"),
    [
        ("2,0", None, None, KEY_A),
        ("2,0", "1", None, KEY_B),  # HIP counts positions in the list of ROCR
        ("2,0", None, "1", KEY_B),  # HIP reads CUDA's variable too
        (None, "1", "0", KEY_C),  # HIP's own variable is used instead of CUDA's variable
    ],
)
def test_visible_devices_of_hip_are_positions_in_the_list_of_rocr(library, rocr, hip, cuda, expected):
    found, _ = device_of(library, rocr_visible_devices=rocr, hip_visible_devices=hip, visible_devices=cuda)

    assert found == expected


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_no_energy_is_measured_with_a_wrong_counter_and_no_power(library, rate):
    reader = library.of(rate=rate, lacking=["amdsmi_get_power_info"])
    sample, _ = reader.read()

    assert (reader.device.energy_method, sample.energy_j) == (None, None)
    assert "AMD SMI gives no power, and the energy counter is not used: " in reader.device.not_measured[-1]
