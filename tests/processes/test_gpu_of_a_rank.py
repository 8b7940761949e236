"""Real jobs whose ranks use GPUs that are not CUDA's current device: fake torch.cuda, simulated NVML."""

from __future__ import annotations

import jobs
import pytest
from nvml_library import GIB, Gpu, Trace, flat

pytestmark = jobs.needs_torch

GPUS = [
    Gpu(
        f"GPU-{n}{n}{n}{n}0000-0000-4000-8000-000000000000",
        f"00000000:{n}0:00.0",
        power=flat(100.0 * n),
        memory=flat(n * GIB),
    )
    for n in (1, 2)
]


def train(launch, library, tmp_path, used, *arguments):
    """Train a rank per GPU in ``used``; return the summary, the ranks' rows, and the events of a kind."""
    trace = Trace(library, tmp_path / "trace")
    trace.write(*GPUS)
    aggregator = launch.aggregator(peak_tflops=1.0, price_per_gpu_hour=2.0)
    uuids = ",".join(gpu.uuid.removeprefix("GPU-") for gpu in GPUS)
    ranks = [
        launch.python(
            "fake_gpus_loop.py", "--uuids", uuids, "--used", ",".join(map(str, used)), *arguments,
            environ=jobs.rank_environ(rank, len(used)) | trace.environment(),
            device="nvml", collection_interval=0.05, endpoint=aggregator.endpoint,
        )
        for rank in range(len(used))
    ]  # fmt: skip
    for rank in ranks:
        rank.done()
    assert not aggregator.job.left()
    return aggregator.ledger


def devices_of(ledger, rank):
    return [row.device for row in ledger.ranks if row.rank == rank]


def test_each_rank_measures_the_gpu_of_its_model_without_set_device(launch, library, tmp_path):
    ledger = train(launch, library, tmp_path, (1, 0))

    assert set(devices_of(ledger, 0)) == {GPUS[1].uuid} and set(devices_of(ledger, 1)) == {GPUS[0].uuid}
    summary = ledger.summary
    assert (summary.coverage.gpus_measured, summary.coverage.gpus_expected) == (2, 2)
    assert summary.metrics["run_energy/watts_per_gpu"].value == pytest.approx(150, rel=0.1)
    assert ledger.event_texts("gpu_shared") == []


def test_rank_changes_to_the_gpu_of_its_model(launch, library, tmp_path):
    ledger = train(launch, library, tmp_path, (1, 1), "--stray", "--late")

    # The windows before the change have GPU 0, the only one with a context, or no energy if they were not yet reported.
    before = [row for row in ledger.ranks if row.iteration_last <= 30]
    after = [row for row in ledger.ranks if row.iteration_first > 30]
    assert {row.device for row in after} == {GPUS[1].uuid}
    assert all(row.energy_j is None or row.device == GPUS[0].uuid or row.coverage < 1 for row in before)
    assert min(row.coverage for row in after) > 0.9
    assert (ledger.summary.coverage.gpus_measured, ledger.summary.coverage.gpus_expected) == (1, 1)


def test_values_per_gpu_are_withheld_if_ranks_use_the_same_gpu(launch, library, tmp_path):
    ledger = train(launch, library, tmp_path, (0, 0))

    (text,) = ledger.event_texts("gpu_shared")
    assert text.startswith(f"ranks 0, 1 use the same GPU ({GPUS[0].uuid} on ")
    withheld = ("tokens_per_second_per_gpu", "/watts_per_gpu", "tflops_per_gpu", "mfu_ratio", "gpu_cost")
    assert not [tag for tag in ledger.summary.metrics if tag.endswith(withheld)]
    assert ledger.summary.metrics["aec_watts"].value == pytest.approx(100, rel=0.1)


def test_gpu_that_is_the_only_visible_one_may_be_shared(launch, library, tmp_path):
    ledger = train(launch, library, tmp_path, (0, 0), "--gpus", "1")

    assert ledger.event_texts("gpu_shared") == []
    assert ledger.summary.metrics["run_energy/watts_per_gpu"].value == pytest.approx(100, rel=0.1)
