"""effllm/devices/node/hwmon.py with fake trees of Grace; no such machine was available."""

import pytest
from powercap_tree import forbid_reading

from effllm.devices import DeviceUnavailable
from effllm.devices.node.hwmon import NO_HWMON, open_reader

#: Grace Hopper: the module's power includes Grace's power, which includes both rails.
GRACE_HOPPER = {
    "Module Power Socket 0": 612.4,
    "Grace Power Socket 0": 104.25,
    "CPU Power Socket 0": 46.5,
    "SysIO Power Socket 0": 11.75,
}
#: Two Grace CPUs on a board, in a module without a GPU.
GRACE_GRACE = {
    "Grace Power Socket 0": 210.5,
    "Grace Power Socket 1": 190.25,
    "CPU Power Socket 0": 150.0,
    "CPU Power Socket 1": 130.0,
    "SysIO Power Socket 0": 20.0,
    "SysIO Power Socket 1": 21.0,
}


class Hwmon:
    """A tree like /sys/class/hwmon, with one ACPI power meter per folder."""

    def __init__(self, root, meters=None, below="device", interval_ms="50"):
        self.root, self._below = root, below
        self.files = {}
        for label, watts in (meters or {}).items():
            chip = self.chip("power_meter") / below
            chip.mkdir(exist_ok=True)
            (chip / "power1_oem_info").write_text(label + "\n")
            if interval_ms is not None:
                (chip / "power1_average_interval").write_text(interval_ms + "\n")
            (chip / "power1_accuracy").write_text("100.0%\n")
            self.files[label] = chip / "power1_average"
            self.set_w(label, watts)

    def chip(self, name):
        chip = self.root / f"hwmon{len(list(self.root.glob('hwmon*')))}"
        chip.mkdir(parents=True)
        (chip / "name").write_text(name + "\n")
        return chip

    def set_w(self, label, watts):
        self.files[label].write_text(f"{round(watts * 1e6)}\n")


@pytest.fixture
def grace_hopper(tmp_path):
    return Hwmon(tmp_path / "hwmon", GRACE_HOPPER)


def watts(hwmon):
    sample, failures = open_reader("node1", hwmon.root).read()
    assert failures == {}
    return sample.power_average_w


def why_not(root):
    with pytest.raises(DeviceUnavailable) as caught:
        open_reader("node1", root)
    return str(caught.value)


@pytest.mark.parametrize(
    ("meters", "below", "expected_w"),
    [
        (GRACE_HOPPER, "device", 104.25),  # the rails (46.5 and 11.75 W) and the module (612.4 W) are not added
        (GRACE_HOPPER, ".", 104.25),  # newer kernels have the files one folder higher
        (GRACE_GRACE, "device", 210.5 + 190.25),
        ({f"Grace Power Socket {socket}": 10.0 for socket in range(12)}, "device", 120.0),
        # names of the successor of Grace
        ({"Total Power Socket 0": 300.0, "CPU Rail Power Socket 0": 200.0}, "device", 300.0),
        ({"Total Input Power in uW Socket 0": 300.0, "CPU Rail Power Socket 0": 200.0}, "device", 300.0),
    ],
)
def test_power_of_all_sockets_is_summed_without_their_parts(tmp_path, meters, below, expected_w):
    assert watts(Hwmon(tmp_path, meters, below=below)) == expected_w


def test_device_gives_averaged_power_and_no_energy(grace_hopper):
    reader = open_reader("node1", grace_hopper.root)
    device = reader.device
    sample, _ = reader.read()

    assert (device.key, device.kind, device.energy_method, device.power_scope) == (
        "cpu:node1",
        "hwmon",
        "average power",
        "cpu",
    )
    assert (device.sensor.average_s, device.sensor.tick_s, device.sensor.gain_error) == (0.05, 0.05, 0.05)
    assert (sample.energy_j, sample.power_w) == (None, None)
    assert reader.interval_s == 1.0


def test_cpu_in_a_module_with_a_gpu_has_a_shared_energy_key(grace_hopper, tmp_path):
    beside_a_gpu = open_reader("node1", grace_hopper.root).device
    alone = open_reader("node1", Hwmon(tmp_path / "two", GRACE_GRACE).root).device

    assert (beside_a_gpu.energy_key, alone.energy_key) == ("module-cpu:node1", "")


def test_meter_in_both_folders_is_counted_once(grace_hopper):
    device = grace_hopper.files["Grace Power Socket 0"].parent
    for name in ("power1_average", "power1_oem_info"):
        (device.parent / name).write_text((device / name).read_text())

    assert watts(grace_hopper) == 104.25


@pytest.mark.parametrize(
    ("interval_ms", "expected_s", "source"),
    [("2000", (2.0, 2.0), ""), (None, (1.0, 1.0), "the averaging interval is assumed;")],
)
def test_averaging_interval_is_the_interval_of_reads(tmp_path, interval_ms, expected_s, source):
    reader = open_reader("node1", Hwmon(tmp_path, GRACE_HOPPER, interval_ms=interval_ms).root)

    assert (reader.interval_s, reader.device.sensor.average_s) == expected_s
    assert reader.device.sensor.source.startswith(source)


@pytest.mark.parametrize("microwatts", [0xFFFFFFFF * 1000, 0, -5, "", "N/A"])
def test_implausible_reading_fails_and_the_next_good_one_is_used(grace_hopper, microwatts):
    reader = open_reader("node1", grace_hopper.root)
    grace_hopper.files["Grace Power Socket 0"].write_text(f"{microwatts}\n")
    failed, failures = reader.read()
    grace_hopper.set_w("Grace Power Socket 0", 99.0)
    sample, no_failures = reader.read()

    assert (failed.power_average_w, list(failures)) == (None, ["power_average_w"])
    assert (sample.power_average_w, no_failures) == (99.0, {})


def test_failing_socket_leaves_no_partial_sum(tmp_path):
    hwmon = Hwmon(tmp_path, GRACE_GRACE)
    reader = open_reader("node1", hwmon.root)
    hwmon.files["Grace Power Socket 1"].unlink()

    assert reader.read()[0].power_average_w is None


@pytest.mark.parametrize(
    "meters",
    [{"": 420.0, "System Power": 431.0}, {"Module Power Socket 0": 612.0}, {}],
    ids=["server", "module", "none"],
)
def test_meter_of_a_server_or_of_a_module_is_not_a_cpu_meter(tmp_path, meters):
    assert why_not(Hwmon(tmp_path, meters).root) == NO_HWMON


def test_unreadable_meter_is_named(grace_hopper, monkeypatch):
    forbid_reading(monkeypatch, "power1_average")

    assert "Permission denied" in why_not(grace_hopper.root)
