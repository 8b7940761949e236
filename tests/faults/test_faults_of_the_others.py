"""Energy faults of Megatron, Zeus, CodeCarbon and perun; each test would fail with that tool.

Tests of single modules have the other faults of these tools: a counter that is reset, repeated readings, a failed read
that counts as 0 J, units, slices of a GPU, a lost GPU, visible devices in any order.
"""

import time

import jobs
import msgspec
import pytest
from builders import NS
from nvml_library import Gpu, flat

from effllm.agent.series import Series
from effllm.devices import Site
from effllm.devices._nvml_identity import choose_uuid
from effllm.energy.calibration import Calibration, store
from effllm.records.rank import COUNTER, Device, Sample, Sensor

LOOP = "loop.py"


@pytest.mark.alone
def test_ranks_measure_their_own_gpus_and_call_no_nvml(launch, trace, tmp_path):
    """The launcher sets CUDA_VISIBLE_DEVICES=$LOCAL_RANK: NVML's index 0 is another job's GPU."""
    trace.write(*(Gpu(f"GPU-{n}", f"0:0{n}:00", power=flat(watts)) for n, watts in enumerate((400.0, 100.0, 250.0))))
    trace.count_calls()
    # An earlier job has calibrated this model: before, windows shorter than an assumed tick have no energy.
    known = Calibration("Traced", "570.0", time.strftime("%Y-%m-%d"), Sensor())
    store(tmp_path / "cache" / "efficientllm" / "calibration", known)
    aggregator = launch.aggregator()
    ranks = [
        launch.python(
            LOOP,
            *("--iterations", 60, "--step-s", 0.05),
            environ=jobs.rank_environ(rank, 2) | trace.environment() | {"CUDA_VISIBLE_DEVICES": str(rank + 1)},
            device="nvml",
            endpoint=aggregator.endpoint,
        )
        for rank in (0, 1)
    ]
    trainers = [rank.done().process.pid for rank in ranks]
    assert not aggregator.job.left()
    rows, summary = aggregator.ledger.ranks, aggregator.ledger.summary

    assert {row.rank: row.device for row in rows} == {0: "GPU-1", 1: "GPU-2"}
    first_w = {row.rank: row.energy_j / row.wall_s for row in rows if row.window == 1}
    assert first_w == pytest.approx({0: 100.0, 1: 250.0}, rel=0.05), "Megatron: no power in the first window"
    assert summary.metrics["aec_watts"].value == pytest.approx(100 + 250, rel=0.02), "Megatron: 800 W"
    assert set(summary.energy.by_device) == {"GPU-1", "GPU-2"}, "Zeus: an unused GPU was measured too"
    assert sum(sum(trace.call_count(pid).values()) for pid in trainers) == 0
    assert sum(trace.call_count().values()) > 0


def test_megatron_3_rank_without_pynvml_blocks_no_rank(launch, trace, tmp_path):
    trace.write(Gpu("GPU-a", "0:01:00"))
    (tmp_path / "missing").mkdir()
    (tmp_path / "missing" / "pynvml.py").write_text("raise ModuleNotFoundError('No module named pynvml')\n")
    environ = trace.environment() | jobs.first_on_path(tmp_path / "missing")
    job = launch.python(LOOP, "--iterations", 60, environ=environ, device="nvml").done()

    assert job.max_step_s() < 0.01 + 1.0
    assert any("needs a package that is not installed" in text for text in job.ledger.event_texts("agent"))
    assert job.ledger.summary.iterations == 60
    assert job.ledger.summary.energy.total_joules is None, "CodeCarbon: 0 kWh"


HANDLERS = """
import json, signal
import effllm.efficientllm_metrics as effllm

def handlers():
    return [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]

def exit_signal_handler(number, frame):
    pass

signal.signal(signal.SIGTERM, exit_signal_handler)  # as Megatron's --exit-signal-handler does
seen = [handlers()]
effllm.initialize_efficientllm_metrics(1000)
seen.append(handlers())
effllm.finalize_efficientllm_metrics()
json.dump([*seen, handlers()], open("truth.json", "w"))
"""


def test_codecarbon_5_no_signal_handler_is_installed_or_replaced(launch):
    before, during, after = launch.code(HANDLERS).done().output()

    assert before == during == after
    assert "exit_signal_handler" in after[0]


def test_zeus_5_energy_is_stored_with_the_time_of_its_read(trace):
    # Reads of memory and utilization take 60 ms each; a wrong time of a read would misplace 500 W * 60 ms = 30 J.
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(500.0)))
    trace.fault("0 memory delay 0.06", "0 utilization delay 0.06")

    with trace.reader(Site()) as reader:
        first, second = reader.read()[0], reader.read()[0]

    for sample in (first, second):
        assert sample.energy_j == pytest.approx(500.0 * sample.time_ns / 1e9, abs=2.0)
    assert second.time_ns - first.time_ns > 0.1 * NS


def test_perun_gpu_with_a_two_digit_number_is_found():
    uuids = [f"GPU-{n:02d}" for n in range(16)]

    assert choose_uuid(Site(0, visible_devices="12"), uuids) == "GPU-12"
    assert choose_uuid(Site(12), uuids) == "GPU-12"
    assert choose_uuid(Site(2, visible_devices="10,11,12,13"), uuids) == "GPU-12"


def test_zeus_3_only_readings_of_the_open_window_are_kept():
    one = Series(Device("GPU-0", "nvml", energy_method=COUNTER), 5.0)
    kept = []
    for second in range(2000):
        one.add_sample(Sample(second * NS + 1, 1.0, 0.5, 100.0, 100.0 * second))
        if second % 10 == 9:
            one.forget_before(second * NS + 1)
            kept.append(len(one.samples) + len(one.energy.readings))

    assert max(kept[10:]) < 20


def test_perun_report_size_does_not_grow_with_samples():
    def row_bytes(samples):
        one = Series(Device("GPU-0", "nvml", energy_method=COUNTER), 5.0)
        for i in range(samples):
            at_ns = i * 10 * NS // samples + 1
            one.add_sample(Sample(at_ns, 1e9, 0.5, 300.0, 300.0 * at_ns / NS))
        return len(msgspec.msgpack.encode(one.take_window(1, 10 * NS - NS // samples, {})))

    assert row_bytes(10_000) <= row_bytes(20) + 20


def test_nothing_is_written_outside_the_run_folder(launch):
    # CodeCarbon#232: a BigScience run ended, because emissions.csv could not be written.
    job = launch.python(LOOP, run_dir="/proc/no-such-place").done()

    assert sorted(path.name for path in job.folder.iterdir()) == ["stderr.txt", "stdout.txt", "truth.json"]
    assert len(job.output()["steps"]) == 20
