"""Faults of the module that effllm replaces; each test would fail with that module.

Other files have the faults 3 (a wrong number stopped the loop), 6 (GPUs of other jobs), 7 (the values of one
rank) and 9 (an early end).
"""

import time

import jobs
import pytest
from nvml_library import GIB, Gpu, flat, square

LOOP = "loop.py"


def value(job, tag):
    return job.ledger.summary.metrics[tag].value


# 1. Tokens were cumulative, but time came from a bounded buffer.


@pytest.mark.alone
def test_1_tt_and_st_do_not_grow_after_history_size_iterations(launch):
    job = launch.python(LOOP, "--iterations", 400, "--step-s", 0.002, history_size=16).done()
    steps = job.output()["steps"]
    seconds = steps[-1][1] - steps[0][0]

    assert value(job, "tt_tokens_per_param_per_sec") == pytest.approx(400 * 100 / 1000 / seconds, rel=0.02)
    assert value(job, "st_samples_per_param_per_sec") == pytest.approx(400 * 2 / 1000 / seconds, rel=0.02)


# 2. Disabled metrics still printed blocks of zeros.

DISABLED = """
import sys, os, threading
import effllm.efficientllm_metrics as effllm
before = set(os.listdir("/proc/self/fd"))
effllm.initialize_efficientllm_metrics(1000, 0.5)
collector = effllm.get_metrics_collector()
for iteration in range(1, 31):
    collector.record_iteration_start()
    collector.record_iteration_end(10, 1)
    assert not effllm.should_log_metrics(iteration)
    values = collector.log_metrics(iteration, 1.0)
    assert len(values) == 6 and all(value != value for value in values.values())
    with collector.phase("evaluation"):
        pass
assert collector.calculate_al() != collector.calculate_al()
effllm.finalize_efficientllm_metrics()
assert set(os.listdir("/proc/self/fd")) == before
assert threading.active_count() == 1
assert not open(f"/proc/self/task/{os.getpid()}/children").read()
assert not {"zmq", "pynvml", "msgspec"} & set(sys.modules)
"""


def test_2_disabled_metrics_start_no_process_and_write_nothing(launch):
    job = launch.code(DISABLED, metrics_enabled="FALSE", log_interval="also nonsense").done()

    assert (job.stdout, job.stderr) == ("", "")
    assert not job.runs()
    assert sorted(path.name for path in job.folder.iterdir()) == ["script.py", "stderr.txt", "stdout.txt"]


# 4. AMU and AEC were means of samples, regardless of the times of the samples.

BURSTS = """
import time
import effllm.efficientllm_metrics as effllm
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
time.sleep(1 - time.monotonic() % 1)
begin = int(time.monotonic() + 0.5)
for second in range(3):  # a burst of short iterations while memory is high, a long one while it is low
    for tick in range(1, 9):
        collector.record_iteration_start()
        time.sleep(max(begin + second + tick * 0.03125 - time.monotonic(), 0))
        collector.record_iteration_end(1, 1)
    collector.record_iteration_start()
    time.sleep(begin + second + 1 - time.monotonic())
    collector.record_iteration_end(1, 1)
effllm.finalize_efficientllm_metrics()
"""


@pytest.mark.alone
def test_4_amu_and_aec_are_weighted_by_time_not_by_samples(launch, trace):
    trace.write(Gpu("GPU-a", "0:01:00", memory=square(8 * GIB, 72 * GIB, 1.0, 0.25), power=square(100, 900, 1.0, 0.25)))
    job = launch.code(
        BURSTS, environ=trace.environment(), device="nvml", log_interval=1, collection_interval=0.06
    ).done()

    # The values are high for a quarter of the time. They are high in half of the samples, because each window ends with
    # a sample.
    assert value(job, "amu_gb") == pytest.approx(0.25 * 72 + 0.75 * 8, abs=3.0)
    assert value(job, "aec_watts") == pytest.approx(0.25 * 900 + 0.75 * 100, abs=30.0)


# 5. A failed reading was stored as 0.


@pytest.mark.parametrize("fault", ["memory error 999", "memory value 18446744073709551615"])
def test_5_failed_reading_is_not_zero(launch, trace, fault):
    trace.write(Gpu("GPU-a", "0:01:00", memory=flat(40 * GIB), utilization=flat(0.5)))
    now_s = time.monotonic()
    trace.fault(*(f"0 {fault} {now_s + at_s} {now_s + at_s + 0.2}" for at_s in (0.7, 1.1, 1.5)))
    job = launch.python(LOOP, "--iterations", 150, environ=trace.environment(), device="nvml").done()

    assert value(job, "amu_gb") == pytest.approx(40.0, rel=1e-9)
    assert value(job, "pcu_ratio") == pytest.approx(0.5, rel=1e-9)
    assert min(window.coverage.memory for window in job.ledger.windows) < 1.0
    assert {block["amu_gb"] for block in job.blocks} <= {"40.00", None}


# 9. Values were written only with a TensorBoard writer.


def test_9_writer_receives_each_report_once_with_its_tags(launch):
    job = launch.code(
        """
import json, time
import effllm.efficientllm_metrics as effllm

class Writer:
    def __init__(self):
        self.got = []
    def add_scalar(self, tag, value, step):
        self.got.append((tag, value, step))

writer = Writer()
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for iteration in range(1, 3001):
    collector.record_iteration_start()
    time.sleep(0.01)
    collector.record_iteration_end(100, 2)
    collector.log_metrics(iteration, 1.0, writer)
    if len({step for _, _, step in writer.got}) > 2 and iteration % 10 == 0:
        break
effllm.finalize_efficientllm_metrics()
json.dump(writer.got, open("truth.json", "w"))
"""
    ).done()
    got = job.output()
    windows = {window.iteration: window.values for window in job.ledger.windows}

    assert len({(tag, step) for tag, _, step in got}) == len(got) > 0
    assert {tag for tag, _, _ in got} == {f"efficientllm/{tag}" for tag in jobs.FORMATS}
    for tag, shown, step in got:
        assert jobs.in_lines(shown) == windows[step][tag.removeprefix("efficientllm/")]


# 10. A second initialisation leaked a thread; evaluation was in AMU, PCU and AEC, but not in AL and TT.


def test_10_repeated_initialisation_leaks_no_thread_process_or_file(launch):
    job = launch.code(
        """
import json, os, threading
import effllm.efficientllm_metrics as effllm

def held():
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    return [threading.active_count(), len(children), len(os.listdir("/proc/self/fd"))]

counts = []
for _ in range(4):
    effllm.initialize_efficientllm_metrics(1000)
    effllm.initialize_efficientllm_metrics(1000)
    collector = effllm.get_metrics_collector()
    for _ in range(5):
        collector.record_iteration_start()
        collector.record_iteration_end(100, 2)
    effllm.finalize_efficientllm_metrics()
    effllm.finalize_efficientllm_metrics()
    counts.append(held())
json.dump(counts, open("truth.json", "w"))
""",
        log_interval=5,
    ).done()

    assert job.output() == [job.output()[0]] * 4
    assert job.output()[0][:2] == [1, 0]
    assert len(job.runs()) == 4
    assert {jobs.Ledger(folder).summary.tokens for folder in job.runs()} == {500}


PHASES = """
import time
import effllm.efficientllm_metrics as effllm
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
def until(second):
    time.sleep(max(second - time.monotonic(), 0))
until(int(time.monotonic()) // 2 * 2 + 2)
begin = int(time.monotonic() + 0.1)
for period in range(3):
    name = "checkpoint" if period == 1 else "evaluation"
    with collector.phase(name):  # while power, memory and utilization are high
        until(begin + 2 * period + 1)
    for step in range(1, 11):
        collector.record_iteration_start()
        until(begin + 2 * period + 1 + step * 0.1)
        collector.record_iteration_end(100, 2)
effllm.finalize_efficientllm_metrics()
"""


@pytest.mark.alone
def test_10_no_metric_includes_evaluation_or_checkpoints(launch, trace):
    # The level lasts a second: readings on a slow machine are 60 to 80 ms apart, as far as their budget allows.
    trace.write(
        Gpu(
            "GPU-a",
            "0:01:00",
            power=square(100.0, 900.0, 2.0),
            memory=square(10 * GIB, 50 * GIB, 2.0),
            utilization=square(0.2, 1.0, 2.0),
        )
    )
    job = launch.code(PHASES, environ=trace.environment(), device="nvml", collection_interval=0.01).done()
    summary = job.ledger.summary

    assert value(job, "al_seconds") == pytest.approx(0.1, abs=0.003)
    assert value(job, "tt_tokens_per_param_per_sec") == pytest.approx(3000 / 1000 / 3, rel=0.03)
    assert value(job, "aec_watts") == pytest.approx(100.0, abs=40.0)
    assert value(job, "amu_gb") == pytest.approx(10.0, abs=4.0)  # 30 with evaluation
    assert value(job, "pcu_ratio") == pytest.approx(0.2, abs=0.08)  # 0.6 with evaluation
    assert summary.time_by_class["evaluation"] == pytest.approx(2.0, abs=0.06)
    assert summary.time_by_class["checkpoint"] == pytest.approx(1.0, abs=0.03)
    assert summary.energy.by_class["evaluation"] == pytest.approx(1800.0, rel=0.08)
    assert summary.energy.by_class["checkpoint"] == pytest.approx(900.0, rel=0.08)
    assert sum(summary.energy.by_class.values()) == pytest.approx(summary.energy.total_joules, rel=1e-6)
    assert value(job, "job/tt_tokens_per_param_per_sec") < value(job, "tt_tokens_per_param_per_sec") / 1.8


# 12. Assumed tokens replaced the tokens that the loop had counted.


def test_12_counts_of_the_loop_replace_the_declared_batch_size(launch):
    job = launch.code(
        """
import effllm.efficientllm_metrics as effllm
effllm.initialize_efficientllm_metrics(1000, 512, 4, 0.1)
collector = effllm.get_efficientllm_collector()
for step in range(10):
    collector.record_step_start()
    if step % 2:
        collector.record_step_end(7, 3)
    else:
        collector.record_step_end()
effllm.finalize_efficientllm_metrics()
"""
    ).done()

    assert job.ledger.summary.tokens == 5 * 7 + 5 * 512 * 4
    assert job.ledger.summary.samples == 5 * 3 + 5 * 4
    assert job.blocks[0]["style"] == "Step"
