"""Complete jobs on devices with known true values: GPUs of a trace with the real pynvml, and simulated GPUs."""

import jobs
import pytest
from nvml_library import GIB, Gpu, Trace, flat, sine

LOOP = "loop.py"
TICK_S = 0.02  # time between two changes of the energy counter, as on an H100
INTERVAL_S = 0.05
# IDLE, A, B is the order of NVML; the order of the PCI buses is A, B, IDLE.
IDLE = Gpu("GPU-cccc0003-0000-4000-8000-000000000003", "00000000:C1:00.0", power=flat(60.0), utilization=flat(0.0))
A = Gpu(
    "GPU-aaaa0001-0000-4000-8000-000000000001",
    "00000000:3B:00.0",
    power=sine(200.0, 600.0, 1.3),
    memory=sine(20.0 * GIB, 40.0 * GIB, 1.7),
    utilization=flat(0.25),
    tick_s=TICK_S,
)
B = Gpu(
    "GPU-bbbb0002-0000-4000-8000-000000000002",
    "00000000:5E:00.0",
    power=sine(100.0, 300.0, 0.9),
    memory=flat(10.0 * GIB),
    utilization=flat(0.75),
    tick_s=TICK_S,
)


@pytest.fixture
def trace(library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(IDLE, A, B)
    return trace


def train_on(launch, trace, *arguments, visible=(None, None), **settings):
    """Run one rank for each item of ``visible``; return the aggregator and the steps of each rank."""
    aggregator = launch.aggregator(**settings)
    chosen = {"device": "nvml", "collection_interval": INTERVAL_S, "endpoint": aggregator.endpoint, **settings}
    shown = [{} if one is None else {"CUDA_VISIBLE_DEVICES": one} for one in visible]
    ranks = [
        launch.python(
            LOOP, *arguments, environ=jobs.rank_environ(rank, len(visible)) | trace.environment() | environ, **chosen
        )
        for rank, environ in enumerate(shown)
    ]
    truths = [rank.done().output()["steps"] for rank in ranks]
    assert not aggregator.job.left()
    return aggregator, truths


def span(steps):
    """Return the start of a rank's first iteration and the end of its last iteration."""
    return steps[0][0], steps[-1][1]


def tick_error_w(gpu, seconds):
    """Return the largest error of the power between two readings of a counter: one tick at the highest power."""
    return gpu.power.high * gpu.tick_s / seconds


@pytest.mark.alone
def test_power_of_two_gpus_is_summed_and_other_values_are_averaged(launch, trace):
    aggregator, truths = train_on(launch, trace, "--iterations", 150)
    summary = aggregator.ledger.summary
    values = {tag: value.value for tag, value in summary.metrics.items()}
    spans = dict(zip((A, B), map(span, truths), strict=True))
    seconds = {gpu: end - start for gpu, (start, end) in spans.items()}
    joules = {gpu: gpu.energy_j(*spans[gpu]) for gpu in spans}
    means = [gpu.memory.integral(*spans[gpu]) / seconds[gpu] / GIB for gpu in spans]

    # Each of two counters is read at two edges; each read can have an error of one tick.
    allowed_w = sum(2 * tick_error_w(gpu, seconds[gpu]) for gpu in spans)
    assert values["aec_watts"] == pytest.approx(sum(joules.values()) / max(seconds.values()), abs=allowed_w)
    assert values["pcu_ratio"] == pytest.approx((0.25 + 0.75) / 2, abs=1e-6)
    # Linear interpolation between samples of a sine has an error of at most (omega h)^2 / 8 of its amplitude: 0.05 GiB.
    assert values["amu_gb"] == pytest.approx(sum(means) / 2, abs=0.1)
    assert set(summary.energy.by_device) == {A.uuid, B.uuid}
    assert (summary.coverage.gpus_measured, summary.coverage.gpus_expected) == (2, 2)
    assert summary.energy.method == "counter"


def test_console_prints_no_energy_line_without_energy(launch, trace):
    trace.write(Gpu("GPU-a", "0:01:00", memory=flat(4 * GIB), unsupported=("energy", "power")))
    aggregator, _ = train_on(launch, trace, visible=(None,))
    summary = aggregator.ledger.summary

    assert all(block["aec_watts"] is None and block["amu_gb"] == "4.00" for block in aggregator.job.blocks)
    assert not [tag for tag in summary.metrics if "watts" in tag or "joules" in tag]
    assert (summary.energy.total_joules, summary.energy.measured_joules) == (None, None)
    assert any(text.startswith("energy: NVML gives neither") for text in summary.not_measured)
