"""Calibration of a GPU's sensor by two seconds of reads, and the cache of its result."""

import datetime
import math
import random
import re
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from builders import NS
from msgspec.structs import replace
from nvml_library import Gpu, square

from effllm.devices import Site
from effllm.energy import calibration
from effllm.energy.calibration import Calibration, calibrate, calibration_delay_s, load, store
from effllm.energy.tick_clock import is_held, tick_and_error_s
from effllm.records.rank import COUNTER, INSTANT, Device, Sample, Sensor

H100 = Device("GPU-1", "nvml", "NVIDIA H100 80GB HBM3", energy_method=COUNTER, driver="570.1")
PROFILE = Calibration(
    H100.name,
    H100.driver,
    "2026-11-01",
    Sensor(tick_s=0.1, tick_error_s=1e-5, lag_s=0.04, lag_error_s=0.005, duty=0.3, gain_error=0.07),
    measured_lag=True,
)


def day(days_ago):
    return (datetime.date.today() - datetime.timedelta(days_ago)).isoformat()


class Board:
    """A GPU in virtual time with a power of 300 W; its energy counter changes every ``tick_s``."""

    def __init__(self, tick_s=0.1, call_s=0.0005, hold=True):
        self.now_s, self.reads = 1000.0, []
        self._tick_s, self._call_s, self._hold = tick_s, call_s, hold

    def read(self):
        self.now_s += self._call_s
        self.reads.append(self.now_s)
        ticks = self.now_s // self._tick_s
        power_w = 300 + (ticks % 7 if self._hold else self.now_s % 1)
        return Sample(round(self.now_s * NS), power_w=power_w, energy_j=30.0 * ticks)

    def sleep(self, seconds):
        self.now_s += seconds + 1e-5

    def monotonic(self):
        return self.now_s


@pytest.fixture
def board(monkeypatch):
    def made(**traits):
        board = Board(**traits)
        monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=board.monotonic, sleep=board.sleep))
        return board

    return made


def lasted_s(board):
    return board.reads[-1] - 1000.0


@pytest.mark.parametrize("tick_s", [0.02, 0.1, 0.106, 0.25])
def test_tick_of_a_counter_is_found_in_two_seconds(board, tmp_path, tick_s):
    watched = board(tick_s=tick_s)

    sensor = calibrate(H100, watched.read, tmp_path)

    assert abs(sensor.tick_s - tick_s) <= sensor.tick_error_s < 0.01 * tick_s
    assert lasted_s(watched) <= 2.01
    assert sensor.is_held
    assert sensor.source == "measured here"


@pytest.mark.parametrize("call_s", [0.0001, 0.0003, 0.0005, 0.001])
def test_driver_time_of_a_calibration_is_two_percent_and_the_usual_tick_is_found(board, call_s):
    for start_s in (0.0, 0.013, 0.031, 0.057, 0.083):
        watched = board(tick_s=0.1, call_s=call_s)
        watched.now_s += start_s

        sensor = calibrate(H100, watched.read, None)

        assert len(watched.reads) * call_s <= 0.02 * 2.0 + call_s + 1e-9
        assert abs(sensor.tick_s - 0.1) <= sensor.tick_error_s < 0.001


@pytest.mark.parametrize("call_s", [0.0001, 0.0005, 0.001, 0.003])
@pytest.mark.parametrize("tick_s", [0.001, 0.02, 0.1, 0.25])
def test_tick_is_never_outside_its_stated_error(board, tick_s, call_s):
    for step in range(20):
        watched = board(tick_s=tick_s, call_s=call_s)
        watched.now_s += 0.0137 * step
        measured = calibration._measure_counter(watched.read, calibration._sleep_until).tick_and_error_s

        assert measured is None or abs(measured[0] - (tick_s if tick_s > 0.005 else 0.0)) <= measured[1]


def test_slow_reads_do_not_show_that_a_power_reading_is_held(board):
    assert (
        calibration._measure_counter(board(call_s=0.003, hold=False).read, calibration._sleep_until).is_held is not True
    )


def test_ranks_of_a_node_calibrate_after_each_other():
    turns_s = [calibration_delay_s(local_rank) for local_rank in range(8)]

    assert turns_s[0] == 0.0
    assert all(second - first >= calibration.MAX_S for first, second in pairwise(turns_s))


@pytest.mark.parametrize("call_s", [0.03, 0.5, 1.5])
def test_slow_driver_extends_calibration_by_at_most_one_call(board, call_s):
    watched = board(call_s=call_s)

    sensor = calibrate(H100, watched.read, None)

    assert watched.now_s - 1000.0 <= 2.0 + call_s + 1e-4
    assert sensor.call_s == pytest.approx(call_s)


def test_tick_of_the_hardware_table_is_kept_if_reads_are_too_sparse(board):
    # A call takes 30 ms, and the pause after the call takes 90 ms. In these 120 ms a counter with a tick of 100 ms
    # always changes.
    sensor = calibrate(H100, board(call_s=0.03).read, None)

    assert sensor.tick_s == 0.1
    assert sensor.source == "hardware table: the reads found no tick"


def test_counter_that_changes_at_every_read_is_continuous():
    assert tick_and_error_s([(step * 2_000_000, 0.6 * step) for step in range(1000)]) == (0.0, 0.0)


def readings(tick_s, apart_s, seed, jitter_s=0.0, delay_s=0.0):
    """Return two seconds of reads of a counter, one about every ``apart_s``; some reads are delayed."""
    chance = random.Random(seed)
    now_s, phase_s, found = 1000.0 + chance.random(), chance.uniform(0, tick_s), []
    end_s = now_s + 2.0
    while now_s < end_s:
        tick = math.floor((now_s - phase_s) / tick_s)
        if jitter_s and now_s < phase_s + tick * tick_s + jitter_s * random.Random(tick).random():
            tick -= 1
        found.append((round(now_s * NS), 30.0 * tick))
        now_s += apart_s * chance.uniform(0.95, 1.1)
        if delay_s and chance.random() < 0.02:
            now_s += chance.uniform(0, delay_s)
    return found


@pytest.mark.parametrize("tick_s", [0.01, 0.02, 0.1, 0.106])
@pytest.mark.parametrize("part", [0.03, 0.1, 0.4, 0.45, 0.5])
@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_tick_is_found_within_its_error_for_every_read_period(tick_s, part, delay_s):
    for seed in range(10):
        found_s, error_s = tick_and_error_s(readings(tick_s, part * tick_s, seed, delay_s=delay_s))

        assert abs(found_s - tick_s) <= error_s
        assert error_s < 0.1 * tick_s


def test_varying_call_times_do_not_reduce_the_precision_of_a_tick():
    chance, reads, now_s = random.Random(1), [], 1000.0
    while now_s < 1002.0:
        reads.append((round(now_s * NS), 30.0 * math.floor(now_s / 0.1)))
        now_s += chance.choice([0.002, 0.002, 0.002, 0.004, 0.009])

    tick_s, error_s = tick_and_error_s(reads)

    # The times of the first and the last of nineteen ticks are known with an error of some milliseconds.
    assert abs(tick_s - 0.1) <= error_s < 5e-4


@pytest.mark.parametrize("tick_s", [0.02, 0.1])
def test_jitter_increases_the_error_of_a_tick(tick_s):
    for seed in range(10):
        jittering = tick_and_error_s(readings(tick_s, 0.002, seed, jitter_s=0.4 * tick_s))
        steady = tick_and_error_s(readings(tick_s, 0.002, seed))

        assert abs(jittering[0] - tick_s) <= jittering[1] + 1e-3 * tick_s
        assert jittering[1] > 2 * steady[1]


def test_tick_of_a_constant_counter_is_unknown():
    assert tick_and_error_s([]) is None
    assert tick_and_error_s([(step * 2_000_000, 7.0) for step in range(1000)]) is None
    assert tick_and_error_s([(step * 2_000_000, 7.0 + (step > 300) + (step > 700)) for step in range(1000)]) is None


def test_calibration_keeps_duty_and_gain_of_the_hardware_table(board, tmp_path):
    sensor = calibrate(H100, board(tick_s=0.05).read, tmp_path)

    # For an H100, the hardware table has a duty of 25 ms in 100 ms, a gain error of 5 % (the sensor was not compared
    # with a meter), and no lag. So the error of the lag is one tick.
    assert (sensor.duty, sensor.gain_error, sensor.lag_s) == (0.25, 0.05, 0.0)
    assert sensor.lag_error_s == sensor.tick_s == pytest.approx(0.05, abs=1e-4)


def test_function_is_held_returns_none_for_constant_power():
    samples = [Sample(step, power_w=60.0, energy_j=step // 5) for step in range(100)]

    assert is_held(samples) is None
    assert all(first.power_w == second.power_w for first, second in pairwise(samples))


@pytest.mark.parametrize("tick_s", [0.02, 0.1, 0.106])
@pytest.mark.parametrize("phase_s", [0.0, 0.003, 0.031, 0.077])
def test_calibration_of_an_earlier_job_is_confirmed(board, tmp_path, tick_s, phase_s):
    calibrate(H100, board(tick_s=tick_s).read, tmp_path)
    watched, lines = board(tick_s=tick_s), []
    watched.now_s += phase_s

    second = calibrate(H100, watched.read, tmp_path, report=lines.append)

    assert abs(second.tick_s - tick_s) <= second.tick_error_s
    assert lines == []


# --- a device that contradicts the cache ---


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize(
    ("kept_s", "true_s", "why"),
    [
        (0.1, 0.02, "the counter changes every 20 ms, not every 100 ms"),
        (0.02, 0.1, "the counter changes every 100 ms, not every 20 ms"),
        (0.02, 0.25, "the counter changes every 25[01] ms, not every 20 ms"),
        (0.1, 0.106, "the counter changes every 106 ms, not every 100 ms"),
        (0.0, 0.1, "the counter changes every 100 ms, not all the time"),
        (0.1, 0.001, "the counter changes all the time, not every 100 ms"),
    ],
)
def test_cached_calibration_is_dropped_if_its_tick_is_wrong(board, tmp_path, profiled, kept_s, true_s, why):
    kept = replace(PROFILE, sensor=replace(PROFILE.sensor, tick_s=kept_s), measured_lag=profiled, date=day(3))
    store(tmp_path, kept)
    lines = []

    sensor = calibrate(H100, board(tick_s=true_s).read, tmp_path, report=lines.append)

    (line,) = lines
    assert re.fullmatch(
        f"the calibration of {day(3)} was removed from the cache, and the sensor was measured again: {why}", line
    )
    assert sensor.source == "measured here"
    assert sensor.tick_s == pytest.approx(true_s if true_s > 0.005 else 0.0, abs=2e-3)
    assert (sensor.lag_s, sensor.lag_error_s) == (0.0, sensor.tick_s)
    cached = load(tmp_path, H100.name, H100.driver)
    assert (cached.sensor, cached.measured_lag) == (sensor, False)
    assert calibrate(H100, board(tick_s=true_s).read, tmp_path, report=lines.append).tick_s == sensor.tick_s
    assert len(lines) == 1, "the next start agrees with the new cache"


def test_calibration_for_held_power_is_dropped_if_power_is_not_held(board, tmp_path):
    store(tmp_path, replace(PROFILE, sensor=replace(PROFILE.sensor, is_held=True), date=day(3)))
    lines = []

    sensor = calibrate(H100, board(hold=False).read, tmp_path, report=lines.append)

    assert not sensor.is_held
    assert lines[0].endswith("the power reading changes between the counter's ticks, not at the ticks")


def test_tick_of_a_profile_is_measured_again_at_each_start(board, tmp_path):
    store(tmp_path, replace(PROFILE, date=day(3)))
    lines = []

    sensor = calibrate(H100, board(tick_s=0.101).read, tmp_path, report=lines.append)

    assert (sensor.lag_s, sensor.duty, lines) == (0.04, 0.3, [])
    assert abs(sensor.tick_s - 0.101) <= sensor.tick_error_s < 5e-4


def test_delayed_reads_do_not_change_the_calibration(board, tmp_path):
    store(tmp_path, replace(PROFILE, date=day(3)))
    watched, chance, lines = board(tick_s=0.1), random.Random(3), []

    def read():
        watched.now_s += chance.uniform(0.0, 0.09)  # reads are delayed, as on a busy machine
        return watched.read()

    sensor = calibrate(H100, read, tmp_path, report=lines.append)

    assert (sensor.tick_s, sensor.tick_error_s, lines) == (0.1, PROFILE.sensor.tick_error_s, [])


@pytest.mark.parametrize("call_s", [0.03, 0.5])
def test_cached_calibration_is_kept_if_reads_are_too_slow(board, tmp_path, call_s):
    store(tmp_path, replace(PROFILE, date=day(3)))
    lines = []

    sensor = calibrate(H100, board(call_s=call_s).read, tmp_path, report=lines.append)

    assert (sensor.lag_s, lines) == (0.04, [])
    assert load(tmp_path, H100.name, H100.driver).sensor == PROFILE.sensor


def test_calibration_is_not_written_if_argument_keep_is_false(board, tmp_path):
    calibrate(H100, board().read, tmp_path, keep=False)

    assert list(tmp_path.iterdir()) == []


def test_sensor_is_calibrated_again_after_a_change_of_the_driver(board, tmp_path):
    calibrate(H100, board().read, tmp_path)

    again = calibrate(replace(H100, driver="570.2"), board().read, tmp_path)

    assert again.source == "measured here"


@pytest.mark.parametrize(
    "changes",
    [{}, {"name": f"{H100.name} MIG 1g.10gb"}, {"energy_method": INSTANT}],
    ids=["GPU", "slice", "no counter"],
)
def test_lag_of_the_profile_is_used_by_the_calibration(board, tmp_path, changes):
    store(tmp_path, replace(PROFILE, date=day(3)))
    watched = board()

    sensor = calibrate(replace(H100, **changes), watched.read, tmp_path)

    assert sensor.source == f"profiled {day(3)}, kept in the cache"
    assert (sensor.lag_s, sensor.lag_error_s, sensor.duty, sensor.gain_error) == (0.04, 0.005, 0.3, 0.07)
    assert bool(watched.reads) is ("energy_method" not in changes)


def test_profile_written_during_a_calibration_is_kept(board, tmp_path):
    watched = board()

    def read():
        if len(watched.reads) == 50:
            store(tmp_path, PROFILE)
        return watched.read()

    calibrate(H100, read, tmp_path)

    assert load(tmp_path, H100.name, H100.driver) == PROFILE


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"name": "NVIDIA H100 80GB HBM3", "driver": "570.1", "date": "2026-11-01", "sensor": ["0.1"]}',
        b'{"name": "another", "driver": "570.1", "date": "2026-11-01", "sensor": [0.1]}',
        b'{"name": "NVIDIA H100 80GB HBM3", "driver": "570-1", "date": "2026-11-01", "sensor": [0.1]}',
        b"\xff\xfe\x00",
        b"[" * 5000,
        b'{"name": "\xff"}',
        bytes(1000),
    ],
    ids=["empty", "no fields", "no numbers", "another GPU", "another driver", "binary", "deep", "no text", "zeros"],
)
def test_invalid_calibration_file_is_ignored(board, tmp_path, content):
    store(tmp_path, PROFILE)
    [path] = tmp_path.iterdir()
    path.write_bytes(content)

    assert load(tmp_path, H100.name, H100.driver) is None
    assert calibrate(H100, board().read, tmp_path).source == "measured here"


def test_calibration_file_is_readable_only_by_its_owner(board, tmp_path):
    folder = tmp_path / "cache" / "calibration"

    calibrate(H100, board().read, folder)

    [path] = folder.iterdir()
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    assert path.name == "NVIDIA-H100-80GB-HBM3-570.1.json"


def test_calibration_works_if_its_cache_is_not_writable(board, tmp_path):
    (tmp_path / "file").write_text("")

    assert calibrate(H100, board().read, tmp_path / "file" / "calibration").source == "measured here"


@pytest.mark.parametrize("traits", [{"simulated": True}, {"is_gpu": False}, {"energy_method": None}])
def test_device_without_a_gpu_counter_is_not_calibrated(tmp_path, traits):
    device = replace(H100, **traits)

    assert calibrate(device, lambda: pytest.fail("read"), tmp_path) == device.sensor


# --- through NVML ---


@pytest.mark.alone
def test_calibration_through_nvml_finds_and_stores_the_tick(trace, tmp_path):
    trace.write(Gpu("GPU-a", "0:01:00", power=square(100.0, 600.0, 0.33), tick_s=0.1, duty_s=0.025, power_mode="held"))
    with trace.reader(Site()) as reader:
        began_s = time.monotonic()
        measured = calibrate(reader.device, lambda: reader.call("read_energy")[0], tmp_path / "cache")

    assert time.monotonic() - began_s < 2.5
    assert abs(measured.tick_s - 0.1) <= measured.tick_error_s < 2e-3
    assert measured.is_held
    assert 0.0 < measured.call_s < 0.02


SLOW_START = """
import os, time, effllm
from pathlib import Path

def kept():
    return len(list(Path(os.environ["XDG_CACHE_HOME"]).rglob("calibration/*.json")))

with effllm.monitor(parameters=1000) as monitor:
    time.sleep(2.5)  # a calibration takes 2 s
    before = kept()
    monitor.iteration(tokens=1)
    until_s = time.monotonic() + 20
    while not kept() and time.monotonic() < until_s:
        time.sleep(0.1)
    monitor.iteration(tokens=1)
    print("kept", before, kept())
"""


def test_sensor_is_calibrated_after_the_first_iteration(launch, trace, tmp_path):
    trace.write(Gpu("GPU-a", "0:01:00", power=square(100.0, 600.0, 0.33), tick_s=0.1))
    environ = trace.environment() | {"XDG_CACHE_HOME": str(tmp_path)}

    job = launch.code(SLOW_START, environ=environ, device="nvml").done()

    assert "kept 0 1" in job.stdout
