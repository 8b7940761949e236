"""effllm/devices/node/rapl.py with fake trees of Intel's and AMD's servers; no machine with RAPL was available."""

import shutil

import pytest
from fake_reader import Clock
from powercap_tree import AMD, AMD_DIES, AMD_RANGE_UJ, INTEL_RANGE_UJ, Powercap, forbid_reading

from effllm.devices import DeviceUnavailable
from effllm.devices.node import CPU_INTERVAL_S
from effllm.devices.node.rapl import NO_RAPL, RAPL_UNREADABLE, open_rapl, open_reader
from effllm.energy.device_energy import EnergyLedger
from effllm.records.rank import Sample


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def powercap(tmp_path):
    return Powercap(tmp_path / "powercap")


def opened(powercap, clock, pause=lambda _: None):
    return open_rapl(clock, powercap.root, pause)


def flowed_j(rapl):
    """Return the energy since the start in J; the total starts at 1e9 J, so that the total can also decrease."""
    return round(rapl.energy_j() - 1e9, 6)


@pytest.fixture
def rapl(powercap, clock):
    return opened(powercap, clock)


# --- powercap ---


def test_energy_is_the_sum_of_both_packages_and_their_dram(powercap, rapl, clock):
    clock.now_s += 1.0
    powercap.set_j("intel-rapl:0", 1200)
    powercap.set_j("intel-rapl:0:1", 1030)
    powercap.set_j("intel-rapl:1", 1100)
    powercap.set_j("intel-rapl:1:0", 1020)
    powercap.set_j("intel-rapl:0:0", 1150)  # cores: a part of the package
    powercap.set_j("intel-rapl:2", 2000)  # psys: the whole machine

    assert flowed_j(rapl) == 200 + 30 + 100 + 20
    assert rapl.note == "RAPL through powercap: 2 CPU packages with DRAM"


def test_energy_continues_after_a_wrap_around_of_the_counter(powercap, clock):
    powercap.set_j("intel-rapl:0", INTEL_RANGE_UJ / 1e6 - 30)
    rapl = opened(powercap, clock)
    clock.now_s += 1.0
    powercap.set_j("intel-rapl:0", 70)

    assert flowed_j(rapl) == 30 + 70


def test_energy_is_correct_over_several_counter_ranges_of_65_kj(tmp_path, clock):
    powercap = Powercap(tmp_path / "amd", AMD)
    rapl = opened(powercap, clock)
    for _ in range(600):
        clock.now_s += CPU_INTERVAL_S
        powercap.add_j("intel-rapl:0", 280.0)
        energy_j = flowed_j(rapl)

    assert round(AMD_RANGE_UJ / 1e6 / 280) == 234
    assert energy_j == pytest.approx(600 * 280.0)  # this energy is 2.5 times the counter's range
    assert rapl.note == "RAPL through powercap: 1 CPU package without DRAM, which has no counter"


def test_read_error_adds_no_full_counter_range(powercap, rapl, clock):
    clock.now_s += 1.0
    powercap.set_j("intel-rapl:0", 1100)
    assert flowed_j(rapl) == 100
    clock.now_s += 1.0
    # CodeCarbon and perun read a failed counter as 0, and add a full range of 262 kJ for a wrap-around.
    powercap.break_zone("intel-rapl:0")
    with pytest.raises(ValueError, match="invalid literal"):
        rapl.energy_j()
    clock.now_s += 1.0
    powercap.set_j("intel-rapl:0", 1250)

    assert flowed_j(rapl) == 250


def test_read_error_gives_a_failure_and_no_zero_energy(powercap, rapl, clock):
    reader = open_reader("node1", rapl)
    powercap.break_zone("intel-rapl:1:0")
    sample, failures = reader.read()

    assert (sample.energy_j, list(failures)) == (None, ["energy_j"])
    assert failures["energy_j"].startswith("rapl: ")


def test_counter_reset_is_not_a_wrap_around(powercap, rapl, clock):
    clock.now_s += 1.0
    powercap.set_j("intel-rapl:0", 0)  # a wrap-around would mean 261,143 J in a second
    with pytest.raises(ValueError, match="reset"):
        rapl.energy_j()
    before_j = rapl.energy_j()
    clock.now_s += 1.0
    powercap.set_j("intel-rapl:0", 50)

    assert rapl.energy_j() - before_j == 50


def test_counter_fails_if_it_may_have_wrapped_twice_between_reads(tmp_path, clock):
    powercap = Powercap(tmp_path / "amd", AMD)
    rapl = opened(powercap, clock)
    clock.now_s += 65.0  # at 1,000 W the range of 65.5 kJ lasts 65.5 s
    powercap.set_j("intel-rapl:0", 1100)

    with pytest.raises(ValueError, match="wrapped"):
        rapl.energy_j()


def test_unknown_energy_after_a_counter_reset_stays_a_gap(powercap, rapl, clock):
    reader = open_reader("node1", rapl)
    ledger = EnergyLedger(reader.device, max_gap_s=5.0)

    def read(second):
        clock.now_s += 1.0
        try:
            energy_j = rapl.energy_j()
        except ValueError:
            energy_j = None
        ledger.add(Sample(time_ns=second * 10**9, energy_j=energy_j))

    for second in range(1, 11):  # the power is 100 W; a reset is between the 4th and the 5th reading
        powercap.set_j("intel-rapl:0", 1000 + 100 * second if second < 5 else 100 * (second - 5))
        read(second)

    energy = ledger.energy(10**9, 10 * 10**9)
    # Energy is known from 1 to 4 s and 6 to 10 s: the 7th reading has the first valid difference after the reset.
    assert (energy.joules, energy.covered_s) == (pytest.approx(300 + 400), pytest.approx(3 + 4))


def test_the_counters_are_read_at_least_once_a_minute(rapl):
    assert open_reader("node1", rapl).interval_s <= 60.0


def test_device_is_a_cpu_counter_with_a_stated_error(rapl):
    device = open_reader("node1", rapl).device

    assert (device.key, device.kind, device.is_gpu, device.only_power) == ("cpu:node1", "rapl", False, True)
    assert (device.energy_method, device.power_scope) == ("counter", "cpu")
    assert (device.sensor.tick_s, device.sensor.gain_error) == (0.001, 0.10)
    assert device.sensor.source.startswith("the error is assumed")


# --- dies that mirror one counter ---


class Dies:
    """A pause in which every socket draws power; the counters of all its dies show this power."""

    def __init__(self, powercap, sockets, watts=(100.0, 130.0)):
        self._powercap, self._sockets, self._watts = powercap, sockets, watts
        self.num_pauses = 0

    def __call__(self, seconds):
        self.num_pauses += 1
        for zones, watts in zip(self._sockets, self._watts, strict=False):
            for zone in zones:
                self._powercap.add_j(zone, watts * seconds)


DIES = (("intel-rapl:0", "intel-rapl:1"), ("intel-rapl:2", "intel-rapl:3"))


@pytest.mark.parametrize("start_j", [1000.0, AMD_RANGE_UJ / 1e6 - 2.5])  # 1 J per pause: the second wraps in the third
def test_dies_that_mirror_one_counter_are_counted_once(tmp_path, clock, start_j):
    powercap = Powercap(tmp_path / "dies", AMD_DIES)
    for zone in DIES[0]:
        powercap.set_j(zone, start_j)
    draw = Dies(powercap, DIES)
    rapl = opened(powercap, clock, draw)
    clock.now_s += 1.0
    draw(1.0)

    assert flowed_j(rapl) == pytest.approx(100 + 130)
    assert rapl.note.startswith("RAPL through powercap: 2 CPU packages without DRAM")
    assert rapl.note.endswith("; 2 more packages repeat these counters and are not counted again")


def test_two_sockets_are_distinguished_after_one_pause(powercap, clock):
    draw = Dies(powercap, (("intel-rapl:0",), ("intel-rapl:1",)), (100.0, 100.01))
    rapl = opened(powercap, clock, draw)
    clock.now_s += 1.0
    draw(1.0)

    assert flowed_j(rapl) == pytest.approx(200.01)
    assert draw.num_pauses == 1 + 1


def test_idle_counters_are_not_mistaken_for_mirrors(powercap, rapl, clock):
    clock.now_s += 1.0
    powercap.add_j("intel-rapl:0", 10)
    powercap.add_j("intel-rapl:1", 10)

    assert flowed_j(rapl) == 20


def test_equal_dram_power_of_two_sockets_is_counted_twice(powercap, clock):
    dram = ("intel-rapl:0:1", "intel-rapl:1:0")
    draw = Dies(powercap, (dram, ("intel-rapl:0",), ("intel-rapl:1",)), (20.0, 100.0, 110.0))
    rapl = opened(powercap, clock, draw)
    clock.now_s += 1.0
    draw(1.0)

    assert flowed_j(rapl) == pytest.approx(20 + 20 + 100 + 110)


# --- missing permission ---


def why_not(clock, powercap):
    with pytest.raises(DeviceUnavailable) as caught:
        open_rapl(clock, powercap, lambda _: None)
    return str(caught.value)


@pytest.mark.parametrize("is_masked", [False, True])
def test_missing_or_masked_counters_are_reported(tmp_path, clock, is_masked):
    if is_masked:  # as in a container
        (tmp_path / "intel-rapl:0").symlink_to(tmp_path / "devices" / "virtual" / "powercap" / "intel-rapl:0")

    assert why_not(clock, tmp_path) == NO_RAPL


def test_report_of_unreadable_counters_has_the_remedies(powercap, clock, monkeypatch):
    forbid_reading(monkeypatch, "energy_uj")

    assert why_not(clock, powercap.root) == RAPL_UNREADABLE
    assert "tmpfiles.d" in RAPL_UNREADABLE
    assert "CAP_DAC_READ_SEARCH" in RAPL_UNREADABLE


def test_unexpected_powercap_tree_is_described_in_the_error(powercap, clock):
    powercap.break_zone("intel-rapl:0")

    assert why_not(clock, powercap.root).endswith(
        "cannot be read through powercap: invalid literal for int() with base 10: ''"
    )


def test_removed_tree_is_a_failed_reading_and_no_crash(powercap, rapl):
    reader = open_reader("node1", rapl)
    shutil.rmtree(powercap.root)

    assert list(reader.read()[1]) == ["energy_j"]
