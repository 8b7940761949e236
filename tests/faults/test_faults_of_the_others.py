"""Energy faults of Megatron, Zeus, CodeCarbon, carbontracker and perun; each test would fail with that tool.

The numbers in the test names are from a list of defects, which were found in the tools' sources.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import jobs
import msgspec
import psutil
import pytest
from builders import NS
from nvml_library import GIB, Gpu, Trace, flat, square
from powercap_tree import Powercap

from effllm.agent.sampler import Sampler
from effllm.agent.series import Series
from effllm.devices import Reader, Site, host
from effllm.devices._nvml_identity import choose_uuid
from effllm.devices.node.rapl import open_rapl
from effllm.energy.calibration import Calibration, calibrate, store
from effllm.energy.device_energy import EnergyLedger
from effllm.records.rank import COUNTER, INSTANT, Device, Sample, Sensor

LOOP = "loop.py"


def reading(trace, gpus, code):
    """Run ``code`` in a process whose pynvml has these GPUs; return the variable ``answer``."""
    trace.write(*gpus)
    script = f"""
import json, os, time
from effllm.devices import Site, open_device
from effllm.energy.device_energy import EnergyLedger

def fault(*lines):
    path = os.environ["NVML_TRACE"] + ".faults"
    open(path + ".draft", "w").write("".join(line + chr(10) for line in lines))
    os.replace(path + ".draft", path)

{code}
print(json.dumps(answer))
"""
    environ = os.environ | trace.environment()
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ledger(method=COUNTER):
    return EnergyLedger(Device("GPU-0", "nvml", energy_method=method, power_limit_w=700.0), 5.0)


def fed(one, *rows):
    """Add readings as tuples of (second, watts, joules)."""
    for seconds, watts, joules in rows:
        one.add(Sample(round(seconds * NS) + 1, power_w=watts, energy_j=joules))
    return one


def joules(one, start_s, end_s):
    return one.energy(round(start_s * NS) + 1, round(end_s * NS) + 1).joules


# --- one job on a node of three GPUs; its two ranks see one each ---

PHASES = """
import json, time
import effllm.efficientllm_metrics as effllm
effllm.initialize_efficientllm_metrics(1000)
collector, phases = effllm.get_metrics_collector(), {}
for step in range(30):
    if step in (10, 20):
        name, begin = "evaluation" if step == 10 else "checkpoint", time.monotonic()
        with collector.phase(name):
            time.sleep(0.3)
        phases[name] = time.monotonic() - begin
    collector.record_iteration_start()
    time.sleep(0.08)
    collector.record_iteration_end(100, 2)
effllm.finalize_efficientllm_metrics()
json.dump(phases, open("truth.json", "w"))
"""


@pytest.fixture(scope="module")
def wrapped(library, tmp_path_factory):
    """A job whose launcher sets CUDA_VISIBLE_DEVICES=$LOCAL_RANK: NVML's index 0 is another job's GPU."""
    folder = tmp_path_factory.mktemp("wrapped")
    trace = Trace(library, folder / "trace")
    trace.write(
        Gpu("GPU-a", "0:01:00", power=flat(400.0)),
        Gpu("GPU-b", "0:02:00", power=flat(100.0)),
        Gpu("GPU-c", "0:03:00", power=flat(250.0)),
    )
    trace.count_calls()
    # An earlier job has calibrated this model: before, windows shorter than an assumed tick have no energy.
    known = Calibration("Traced", "570.0", time.strftime("%Y-%m-%d"), Sensor())
    store(folder / "cache" / "efficientllm" / "calibration", known)
    with jobs.launching(folder) as launch, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        aggregator = launch.aggregator(log_interval=1)
        ranks = [
            launch.code(
                PHASES,
                environ=jobs.rank_environ(rank, 2) | trace.environment() | {"CUDA_VISIBLE_DEVICES": str(rank + 1)},
                device="nvml",
                log_interval=1,
                endpoint=aggregator.endpoint,
            )
            for rank in (0, 1)
        ]
        for rank in ranks:
            rank.done()
        assert not aggregator.job.left()
        yield aggregator.ledger, trace, [rank.process.pid for rank in ranks], [rank.output() for rank in ranks]


@pytest.mark.alone
def test_megatron_1_rank_reads_its_own_gpu_and_not_gpu_0(wrapped):
    job, *_ = wrapped

    assert {row.rank: row.device for row in job.ranks} == {0: "GPU-b", 1: "GPU-c"}
    # If both ranks read the GPU with index 0, AEC would be 800 W.
    assert job.summary.metrics["aec_watts"].value == pytest.approx(100 + 250, rel=0.02)


def test_megatron_4_power_of_the_first_iteration_is_measured(wrapped):
    job, *_ = wrapped
    first = next(window for window in job.windows if "window/aec_watts" in window.values)

    # `first` is the window of the first iteration, unless samples are missing on a busy machine.
    assert first.iteration_first == first.iteration_last
    before = [row for row in job.ranks if row.iteration_last < first.iteration_first]
    assert {row.window for row in before if (row.coverage or 0.0) < 1.0} == {row.window for row in before}
    # Per rank, because the walls of one iteration differ between the ranks on a busy machine.
    rows = sorted((row.rank, row.energy_j / row.wall_s) for row in job.ranks if row.window == first.window)
    assert [watts for _, watts in rows] == pytest.approx([100.0, 250.0], rel=0.05)


@pytest.mark.alone
def test_megatron_5_total_energy_includes_evaluation_and_checkpoints(wrapped):
    job, _, _, phases = wrapped
    energy = job.summary.energy
    gap_j = 350 * (1 - energy.time_coverage) * job.summary.elapsed_s  # unmeasured energy: a busy machine causes gaps

    for phase in ("evaluation", "checkpoint"):
        truth_j = 100 * phases[0][phase] + 250 * phases[1][phase]
        assert 0.9 * truth_j - gap_j <= energy.by_class[phase] <= 1.1 * truth_j
    assert sum(energy.by_class.values()) == pytest.approx(energy.measured_joules, rel=1e-6)
    watts = {
        rank: [row.energy_j / row.wall_s for row in job.ranks if row.rank == rank and row.energy_j] for rank in (0, 1)
    }
    assert [sum(watts[rank]) / len(watts[rank]) for rank in (0, 1)] == pytest.approx([100.0, 250.0], rel=0.05)


def test_zeus_4_unused_gpus_are_not_in_the_energy(wrapped):
    job, *_ = wrapped

    assert set(job.summary.energy.by_device) == {"GPU-b", "GPU-c"}
    assert job.summary.coverage.gpus_expected == 2


def test_training_processes_make_no_nvml_call(wrapped):
    _, trace, trainers, _ = wrapped

    assert sum(sum(trace.call_count(pid).values()) for pid in trainers) == 0
    assert sum(trace.call_count().values()) > 0


# --- one job of three ranks, on which NVML fails in two ways ---


@pytest.fixture(scope="module")
def broken(library, tmp_path_factory):
    """A job of three ranks: NVML does not start on the second rank, and pynvml is missing on the third rank."""
    folder = tmp_path_factory.mktemp("broken")
    good, bad = Trace(library, folder / "good"), Trace(library, folder / "bad")
    for trace in (good, bad):
        trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0)))
    bad.fault("init * error 18")  # library and driver differ in version
    missing = folder / "missing"
    missing.mkdir()
    (missing / "pynvml.py").write_text("raise ModuleNotFoundError('No module named pynvml')\n")
    places = [good.environment(), bad.environment(), good.environment() | jobs.first_on_path(missing)]
    with jobs.launching(folder) as launch, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        aggregator = launch.aggregator()
        ranks = [
            launch.python(
                LOOP,
                "--iterations",
                60,
                environ=jobs.rank_environ(rank, 3) | place,
                device="nvml",
                endpoint=aggregator.endpoint,
            )
            for rank, place in enumerate(places)
        ]
        for rank in ranks:
            rank.done()
        assert not aggregator.job.left()
        yield aggregator.ledger, ranks


def test_megatron_2_training_on_a_node_without_nvml_continues(broken):
    job, ranks = broken

    assert [len(rank.output()["steps"]) for rank in ranks] == [60, 60, 60]
    assert job.summary.status == "completed"
    assert any("differ in version" in text for text in job.event_texts("agent"))


def test_megatron_3_rank_without_pynvml_blocks_no_rank(broken):
    job, ranks = broken

    assert max(rank.max_step_s() for rank in ranks) < 0.01 + 1.0
    assert any("needs a package that is not installed" in text for text in job.event_texts("agent"))
    assert [window.iteration_last for window in job.windows if not window.final] == [10, 20, 30, 40, 50, 60]


def test_codecarbon_unmeasured_energy_is_not_zero(broken):
    # CodeCarbon reported "0 kWh" for failed reads: issues 1316, 393, 378 and 851.
    job, _ = broken

    assert job.summary.energy.total_joules is None
    assert "energy/total_joules" not in job.summary.metrics
    assert job.summary.energy.measured_joules > 0
    assert set(job.summary.energy.by_device) == {"GPU-a"}


# --- one trainer with all of these faults, one after the other ---

TROUBLED = """
import json, os, signal, threading, time
born = time.monotonic()
import effllm.efficientllm_metrics as effllm

def handlers():
    return [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]

def exit_signal_handler(number, frame):
    pass

signal.signal(signal.SIGTERM, exit_signal_handler)  # as Megatron's --exit-signal-handler does
before = handlers()
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
threads, begin = [], time.monotonic()
while not os.path.exists("enough"):
    collector.record_iteration_start()
    time.sleep(0.05)
    collector.record_iteration_end(100, 2)
    threads.append(threading.active_count())
end = time.monotonic()
effllm.finalize_efficientllm_metrics()
json.dump({"handlers": [before, handlers()], "threads": sorted(set(threads)), "born": born, "begin": begin, "end": end,
           "over": time.monotonic(), "unix_s": time.time()}, open("truth.json", "w"))
"""

#: Every process of the job loads this module: if a file exists, the wall clock is an hour ahead.
STEPPED = """
import os, time
_real = time.time
time.time = lambda: _real() + (3600.0 if os.path.exists({file!r}) else 0.0)
time.time_ns = lambda: int(time.time() * 1e9)
"""


@pytest.fixture(scope="module")
def troubled(library, tmp_path_factory):
    """A job whose power cannot be read for a while, and whose wall clock jumps by an hour."""
    folder = tmp_path_factory.mktemp("troubled")
    trace = Trace(library, folder / "trace")
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0)))
    set_forward = folder / "set forward"
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(STEPPED.format(file=str(set_forward)))
    with jobs.launching(folder) as launch, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        job = launch.code(
            TROUBLED, environ=trace.environment() | jobs.first_on_path(folder / "site"), device="nvml", log_interval=5
        )

        def is_reported(text):
            return any(text in one for one in job.ledger.event_texts("agent"))

        jobs.until(lambda: job.num_windows >= 3)
        trace.fault("0 power error 999")
        jobs.until(lambda: is_reported("power_w is not measured"))
        trace.fault()
        jobs.until(lambda: is_reported("power_w is measured again"))
        set_forward.touch()
        windows = job.num_windows
        jobs.until(lambda: job.num_windows >= windows + 4)
        (job.folder / "enough").touch()
        yield job.done()


@pytest.mark.alone
def test_zeus_5_wall_clock_step_changes_no_energy(troubled):
    truth, summary = troubled.output(), troubled.ledger.summary

    assert truth["unix_s"] > time.time() + 3000, "it was set"
    assert summary.metrics["aec_watts"].value == pytest.approx(300.0, rel=0.01)
    energy = summary.energy
    min_j = 300.0 * (truth["end"] - truth["begin"]) * energy.time_coverage
    assert 0.95 * min_j <= energy.measured_joules < 300.0 * (truth["over"] - truth["born"])
    assert sum(row.wall_s for row in troubled.ledger.ranks) < truth["over"] - truth["born"]


def test_codecarbon_4_trainer_never_has_more_than_one_thread(troubled):
    assert troubled.output()["threads"] == [1]


def test_codecarbon_5_no_signal_handler_is_installed_or_replaced(troubled):
    before, after = troubled.output()["handlers"]

    assert before == after
    assert "exit_signal_handler" in after[0]


def test_carbontracker_failed_power_reading_is_reported_in_one_line(troubled):
    assert troubled.code == 0
    assert troubled.ledger.summary.status == "completed"
    said = troubled.ledger.event_texts("agent")
    assert [text for text in said if "power_w is not measured" in text]
    assert [text for text in said if "power_w is measured again" in text]
    assert troubled.ledger.summary.energy.time_coverage > 0.9, "the counter still measured it"


# --- Megatron ---


@pytest.mark.alone
def test_megatron_5_failed_read_is_not_0_j(trace):
    # The power is 300 W; energy and power cannot be read from the second to the fourth window.
    answer = reading(
        trace,
        [Gpu("GPU-a", "0:01:00", power=flat(300.0))],
        """
reader = open_device("nvml", Site())
ledger, edges, answer = EnergyLedger(reader.device, 1.0), [], []
for window in range(6):
    if window in (1, 4):
        fault(*(["0 energy error 999", "0 power error 999"] if window == 1 else []))
    ledger.add(reader.read()[0])
    edges.append(time.monotonic_ns() - 1000)
    for _ in range(4):
        time.sleep(0.01)
        ledger.add(reader.read()[0])
    if window:
        found = ledger.energy(edges[-2], edges[-1])
        answer.append([found.joules, found.covered_s, (edges[-1] - edges[-2]) / 1e9])
""",
    )

    for found_j, covered_s, length_s in answer:
        if found_j is None:
            assert covered_s == 0.0
        else:
            assert found_j == pytest.approx(300.0 * covered_s, rel=0.05, abs=0.05)
            assert covered_s <= length_s + 1e-9
    assert [found_j is None for found_j, _, _ in answer].count(True) >= 2
    assert answer[0][0] is not None
    assert answer[-1][0] is not None


def test_megatron_6_disabled_metrics_make_no_nvml_call(launch, trace):
    trace.write(Gpu("GPU-a", "0:01:00"))
    trace.count_calls()
    launch.python(LOOP, environ=trace.environment(), device="nvml", metrics_enabled=False).done()

    assert sum(trace.call_count().values()) == 0


# --- Zeus ---


@pytest.mark.parametrize("visible", ["GPU-8d54aaaa-0000-4000-8000-00000000000b", "GPU-8d54", "1,0"])
def test_zeus_1_visible_devices_may_be_uuid_prefixes(trace, visible):
    trace.write(Gpu("GPU-377eaaaa-0000-4000-8000-00000000000a", "0:01:00", memory=flat(1 * GIB)))
    trace.gpus += [Gpu("GPU-8d54aaaa-0000-4000-8000-00000000000b", "0:02:00", memory=flat(2 * GIB))]
    trace.write(*trace.gpus)

    with trace.reader(Site(visible_devices=visible)) as reader:
        assert reader.device.key == trace.gpus[1].uuid
        assert reader.read()[0].memory_bytes == 2 * GIB


def test_zeus_1_gpu_of_torch_is_measured_with_any_cuda_device_order(trace):
    # CUDA_DEVICE_ORDER is fastest-first by default: on unequal GPUs, CUDA's first GPU is not NVML's first GPU.
    trace.write(Gpu("GPU-slow", "0:01:00"), Gpu("GPU-fast", "0:02:00"))

    with trace.reader(Site(local_rank=0, cuda_uuid="GPU-fast")) as reader:
        assert reader.device.key == "GPU-fast"


def test_zeus_2_unchanged_readings_are_not_dropped():
    # 10 s at 100 W and 10 s at 700 W are 8 kJ.  A trapezoid over only the changed readings gives 0 J for the first
    # 10 s, and 4 kJ in total.
    rows = [(s, 100.0, None) for s in range(11)] + [(s + 0.001, 700.0, None) for s in range(10, 21)]
    one = fed(ledger(INSTANT), *rows)

    assert joules(one, 0, 20) == pytest.approx(8000.0, abs=1.0)
    assert joules(one, 2, 8) == pytest.approx(600.0)
    assert joules(one, 2.4, 2.6) == pytest.approx(20.0), "between two readings too"


def test_zeus_3_only_readings_of_the_open_window_are_kept():
    one = Series(Device("GPU-0", "nvml", energy_method=COUNTER), 5.0)
    kept = []
    for second in range(2000):
        one.add_sample(Sample(second * NS + 1, 1.0, 0.5, 100.0, 100.0 * second))
        if second % 10 == 9:
            one.forget_before(second * NS + 1)
            kept.append(len(one._samples) + len(one.energy.readings))

    assert max(kept[10:]) < 20


def test_zeus_5_energy_is_stored_with_the_time_of_its_read(trace):
    # Reads of memory and utilization take 60 ms each; a wrong time of a read would misplace 500 W * 60 ms = 30 J.
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(500.0)))
    trace.fault("0 memory delay 0.06", "0 utilization delay 0.06")

    with trace.reader(Site()) as reader:
        first, second = reader.read()[0], reader.read()[0]

    for sample in (first, second):
        assert sample.energy_j == pytest.approx(500.0 * sample.time_ns / 1e9, abs=2.0)
    assert second.time_ns - first.time_ns > 0.1 * NS


def test_zeus_5_decreasing_counter_gives_no_negative_energy():
    one = fed(ledger(), *((s, 300.0, 1e6 + 300.0 * s if s < 5 else 300.0 * (s - 5)) for s in range(11)))

    assert [joules(one, s, s + 1) for s in range(10)] == pytest.approx([300.0] * 10)


def test_zeus_6_counter_without_ticks_is_read_once_per_edge(tmp_path):
    gpu = Device("GPU-a", "nvml", "A board", energy_method=COUNTER, driver="1")
    today = time.strftime("%Y-%m-%d")
    store(tmp_path, Calibration(gpu.name, gpu.driver, today, Sensor(tick_s=0.0)))
    reads = []

    sensor = calibrate(gpu, lambda: reads.append(1) or Sample(len(reads)), tmp_path)

    assert sensor.tick_s == 0.0
    assert len(reads) <= 2.6 / 0.002  # the two checks at the start take 2.6 s; each read takes 2 ms
    one = EnergyLedger(msgspec.structs.replace(gpu, sensor=sensor), 5.0)
    fed(one, (0, 1.0, 0.0), (1, 1.0, 1.0))
    assert len(one.timing.reads_for(NS)) == 1


def test_zeus_6_stuck_sensor_is_reported(trace):
    # The driver repeats one reading: power is constant, and the counter does not move.
    answer = reading(
        trace,
        [Gpu("GPU-a", "0:01:00", power=square(100.0, 500.0, 0.3))],
        """
reader = open_device("nvml", Site())
ledger = EnergyLedger(reader.device, 5.0)
ledger.add(reader.read()[0])
fault(f"0 * freeze {time.monotonic()}")
end = time.monotonic() + 1.2
while time.monotonic() < end:
    ledger.add(reader.read()[0])
    time.sleep(0.05)
answer = [[event.kind, event.text] for event in ledger.take_events(0.0)]
""",
    )

    assert [kind for kind, _ in answer] == ["energy_counter"]
    assert "no change while the device draws power" in answer[0][1]


# --- CodeCarbon ---


def test_codecarbon_1_uuid_prefix_is_removed_only_as_a_whole(trace):
    # "GPU-8d54...".lstrip("MIG-") is "PU-8d54..."; "MIG-377e..." must also keep its prefix.
    assert "GPU-8d54".lstrip("MIG-") == "PU-8d54"
    gpu = Gpu("GPU-8d54aaaa-0000-4000-8000-00000000000b", "0:01:00", memory_total=80 * GIB)
    other = Gpu("GPU-8d54bbbb-0000-4000-8000-00000000000b", "0:02:00", memory_total=80 * GIB)
    part = Gpu("MIG-377eaaaa-0000-5000-8000-00000000000c", parent=1, memory_total=10 * GIB, slices=1, instance=1)
    trace.write(gpu, other, part)

    for visible in (gpu.uuid, part.uuid):
        with trace.reader(Site(visible_devices=visible)) as reader:
            assert reader.device.key == visible
            assert reader.read()[0].energy_j > 0
    with trace.reader(Site(cuda_uuid=gpu.uuid.removeprefix("GPU-"))) as reader:  # torch's UUID has no prefix
        assert reader.device.key == gpu.uuid


@pytest.mark.alone
def test_codecarbon_2_driver_reload_subtracts_no_energy(trace):
    answer = reading(
        trace,
        [Gpu("GPU-a", "0:01:00", power=flat(300.0))],
        """
reader = open_device("nvml", Site())
ledger, begin = EnergyLedger(reader.device, 5.0), time.monotonic()
def read(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ledger.add(reader.read()[0])
        time.sleep(0.02)
read(0.2)
fault(f"0 energy reset {time.monotonic()}")
read(0.3)
found = ledger.energy(int((begin + 0.1) * 1e9), int((begin + 0.4) * 1e9))
answer = [found.joules, found.covered_s, found.estimated_j, [event.text for event in ledger.take_events(0.0)]]
""",
    )

    found_j, covered_s, estimated_j, texts = answer
    assert found_j == pytest.approx(300.0 * 0.3, rel=0.01)
    assert covered_s == pytest.approx(0.3)
    assert 0.0 < estimated_j < 30.0
    assert "a decrease of" in texts[0]


@pytest.mark.alone
def test_codecarbon_2_lost_gpu_does_not_affect_other_gpus(trace):
    answer = reading(
        trace,
        [Gpu(f"GPU-{n}", f"0:0{n}:00", power=flat(100.0 * (n + 1))) for n in range(8)],
        """
readers = [open_device("nvml", Site(cuda_uuid=f"GPU-{n}")) for n in range(8)]
ledgers = [EnergyLedger(reader.device, 5.0) for reader in readers]
def read():
    for ledger, reader in zip(ledgers, readers):
        ledger.add(reader.read()[0])
read()
begin = time.monotonic_ns()
read()
fault("3 * lost")
lost = time.monotonic_ns()
time.sleep(0.2)
read()
read()
end = begin + 190_000_000
answer = [(lost - begin) / 1e9, *(ledger.energy(begin, end).joules for ledger in ledgers)]
""",
    )

    until_lost_s, *answer = answer
    assert answer[3] is None or answer[3] <= 400.0 * until_lost_s, "its energy before the loss"
    others = [found_j / 0.19 for n, found_j in enumerate(answer) if n != 3]
    assert others == pytest.approx([100.0, 200.0, 300.0, 500.0, 600.0, 700.0, 800.0], rel=0.01)


def test_codecarbon_3_rapl_read_error_is_not_a_wrap_around(tmp_path):
    # CodeCarbon reads the error as 0 and adds 262 kJ for a wrap-around; the next read adds the whole counter.
    tree, now_s = Powercap(tmp_path), [1000.0]
    rapl = open_rapl(lambda: now_s[0], tree.root, lambda _: None)
    before_j = rapl.energy_j()
    tree.break_zone("intel-rapl:0")
    now_s[0] += 1.0
    with pytest.raises(ValueError, match="invalid literal"):
        rapl.energy_j()
    tree.set_j("intel-rapl:0", 1150)
    now_s[0] += 1.0

    assert rapl.energy_j() - before_j == pytest.approx(150.0)


def test_codecarbon_4_samples_start_no_threads():
    class Quick:
        device = Device("GPU-0", "fake")
        reads = 0

        def read(self):
            self.reads += 1
            return Sample(time.monotonic_ns()), {}

        def close(self):
            pass

    reader: Reader = Quick()
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    sampler = Sampler(lambda: reader, 0.005, lambda _event: None, wake)
    before = threading.active_count()
    sampler.start()
    jobs.until(lambda: reader.reads > 50)

    assert threading.active_count() == before + 1
    assert sampler.stop(5.0)
    assert threading.active_count() == before
    os.close(wake)


# --- perun ---


def test_perun_gpu_with_a_two_digit_number_is_found(trace):
    uuids = [f"GPU-{n:02d}" for n in range(16)]
    assert choose_uuid(Site(0, visible_devices="12"), uuids) == "GPU-12"
    assert choose_uuid(Site(12), uuids) == "GPU-12"
    assert choose_uuid(Site(2, visible_devices="10,11,12,13"), uuids) == "GPU-12"
    trace.write(*(Gpu(uuid, f"0:{n:02x}:00", memory=flat(n * GIB)) for n, uuid in enumerate(uuids)))

    with trace.reader(Site(visible_devices="12")) as reader:
        assert (reader.device.key, reader.read()[0].memory_bytes) == ("GPU-12", 12 * GIB)


def test_perun_time_keeps_its_resolution_after_30_days():
    # After 30 days, consecutive float32 times differ by 0.25 s: a burst of 100 ms would last 0 or 250 ms.
    month_s = 30 * 86_400
    one = fed(
        ledger(INSTANT),
        *((month_s + at_s, watts, None) for at_s, watts in [(0, 100.0), (0.1, 100.0), (0.1001, 700.0), (0.2, 700.0)]),
    )

    assert joules(one, month_s + 0.1001, month_s + 0.2) == pytest.approx(700.0 * 0.0999, rel=1e-9)


@pytest.mark.alone
def test_perun_cpu_utilization_is_measured_between_two_samples(monkeypatch, tmp_path):
    # psutil.cpu_percent uses the last call of any caller as the reference.
    monkeypatch.setattr(psutil, "cpu_percent", lambda *_, **__: pytest.fail("not through psutil's one reference"))
    reader = host.open_device(Site(local_rank=1, trainer_pid=os.getpid(), excluded_pids=frozenset()), powercap=tmp_path)
    before, _ = reader.read()
    began_s = time.process_time()
    while time.process_time() < began_s + 0.2:
        pass
    after, _ = reader.read()
    reader.close()

    # The utilization is 20 kernel ticks (0.2 s) of CPU time, as a share of the time of all CPUs.
    capacity_s = (after.time_ns - before.time_ns) / NS * (psutil.cpu_count() or 1)
    assert after.utilization * capacity_s == pytest.approx(0.2, abs=0.04)


def test_perun_report_size_does_not_grow_with_samples():
    def row_bytes(samples):
        one = Series(Device("GPU-0", "nvml", energy_method=COUNTER), 5.0)
        for i in range(samples):
            at_ns = i * 10 * NS // samples + 1
            one.add_sample(Sample(at_ns, 1e9, 0.5, 300.0, 300.0 * at_ns / NS))
        return len(msgspec.msgpack.encode(one.window(1, 10 * NS - NS // samples, {})))

    assert row_bytes(10_000) <= row_bytes(20) + 20


# --- other reported faults: (c) ---


@pytest.mark.alone
def test_gpu_in_slices_is_counted_once(trace):
    # dcgm-exporter#317: each slice repeated the counter of its GPU, so one GPU counted four times.
    halves = [Gpu(f"MIG-{n}", parent=0, memory_total=39 * GIB, slices=3 + n, instance=n + 1) for n in range(2)]
    answer = reading(
        trace,
        [Gpu("GPU-a", "0:01:00", power=flat(700.0), memory_total=80 * GIB), *halves],
        """
readers = [open_device("nvml", Site(visible_devices=uuid)) for uuid in ("MIG-0", "MIG-1")]
before = [reader.read()[0] for reader in readers]
time.sleep(0.2)
after = [reader.read()[0] for reader in readers]
answer = [(last.energy_j - first.energy_j) / (last.time_ns - first.time_ns) * 1e9 for first, last in zip(before, after)]
""",
    )

    assert answer == pytest.approx([300.0, 400.0], rel=0.02)


@pytest.mark.alone
def test_energy_and_power_are_converted_to_joules_and_watts(trace):
    # pyJoules#32: units were wrong by a factor of 1000.
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0), power_limit_w=700.0))

    with trace.reader(Site()) as reader:
        first = reader.read()[0]
        time.sleep(0.1)
        second = reader.read()[0]

        assert reader.device.power_limit_w == 700.0
    assert (first.power_w, second.power_w) == (300.0, 300.0)
    rate_w = (second.energy_j - first.energy_j) / (second.time_ns - first.time_ns) * NS
    assert rate_w == pytest.approx(300.0, rel=0.02)


def test_no_process_remains_after_a_crash(launch, trace):
    # CodeCarbon#409 and #305: the tracker's thread held a crashed job's nodes for three days.
    trace.write(Gpu("GPU-a", "0:01:00"))
    job = launch.python(LOOP, "--at", 5, "--end", "raise", environ=trace.environment(), device="nvml").wait()

    assert job.code == 1
    assert not job.left()


def test_nothing_is_written_outside_the_run_folder(launch, trace):
    # CodeCarbon#232: a BigScience run ended, because emissions.csv could not be written.
    trace.write(Gpu("GPU-a", "0:01:00"))
    job = launch.python(LOOP, environ=trace.environment(), device="nvml", run_dir="/proc/no-such-place").done()

    assert sorted(path.name for path in job.folder.iterdir()) == ["stderr.txt", "stdout.txt", "truth.json"]
    assert len(job.output()["steps"]) == 20


def test_signal_of_the_scheduler_ends_the_trainer(launch, trace):
    trace.write(Gpu("GPU-a", "0:01:00"))
    arguments = ["--iterations", 200, "--at", 150, "--end", "terminate"]
    job = launch.python(LOOP, *arguments, environ=trace.environment(), device="nvml").wait()

    assert job.code == -signal.SIGTERM
    assert not job.left()
    assert job.ledger.summary.iterations == 150
