"""Values of instruments in the run folder: from the training process to the files, over ranks and windows."""

import os
import signal
import statistics

import jobs
import pytest

RANKS = 2
LOSSES = [float(rank + iteration) for rank in range(RANKS) for iteration in range(1, 21)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return the run folder of two ranks, and the output of each rank."""
    with jobs.launching(tmp_path_factory.mktemp("instruments")) as launch:
        aggregator = launch.aggregator()
        ranks = [rank.done() for rank in launch.ranks(aggregator, RANKS, "instruments_loop.py")]
        aggregator.job.done()
        yield aggregator.ledger, [rank.output() for rank in ranks]


def test_values_of_all_ranks_are_in_summary_and_windows(ran):
    ledger, _ = ran
    loss, windows = ledger.summary.instruments["loss"], ledger.windows

    assert (loss.count, loss.total, loss.least, loss.most) == (40, sum(LOSSES), 1.0, 21.0)
    assert loss.std == pytest.approx(statistics.stdev(LOSSES))
    assert loss.not_finite == {"nan": RANKS}
    assert loss.percentiles["p50"] == pytest.approx(statistics.median(LOSSES), abs=0.5)
    assert [window.instruments["loss"].total for window in windows[:2]] == [120.0, 320.0]


def test_values_of_every_instrument_are_in_the_run_folder(ran):
    ledger, truths = ran
    found = ledger.summary.instruments

    assert {name: (one.count, one.unit) for name, one in found.items()} == {
        "after the fork": (2, ""),
        "group/reward": (80, ""),
        "group/reward_std": (40, ""),
        "loss": (40, ""),
        "memory/allocated_bytes": (40, "bytes"),
        "memory/reserved_bytes": (40, "bytes"),
        "only/0": (20, ""),
        "only/1": (20, ""),
        "scores/missing": (40, ""),
        "scores/valid": (40, ""),
        "throughput/samples": (40, ""),
        "throughput/tokens": (40, ""),
        "throughput/update_seconds": (40, "s"),
        "timing/iteration_seconds": (40, "s"),
    }
    measured_s = sum(truth["timing"]["iteration"]["total_sec"] for truth in truths)
    assert found["timing/iteration_seconds"].total == pytest.approx(measured_s)
    assert found["throughput/tokens"].total == 4000


def test_percentiles_of_values_and_timers_are_computed_by_the_agent(ran):
    for rank, truth in enumerate(ran[1]):
        loss, timed = truth["loss"], truth["timing"]["iteration"]

        for found in (loss, timed):
            assert (found["count"], found["percentiles_of"], found["percentiles_are"]) == (20, 20, "estimated")
        assert loss["p50"] == pytest.approx(rank + 10.5, abs=0.5)
        assert 0.01 <= timed["min_sec"] <= timed["p50_sec"] <= timed["p95_sec"] <= timed["max_sec"]


@pytest.mark.fault("aggregator-sigkill")
def test_killed_aggregator_loses_no_value(launch):
    job = launch.python("instruments_loop.py", "enough")
    jobs.until(lambda: job.num_windows >= 3)
    (pid,) = job.find("effllm.server.process")
    os.kill(pid, signal.SIGKILL)
    jobs.until(lambda: job.num_windows >= 10)
    (job.folder / "enough").touch()
    loss = job.done().output()["loss"]
    found = job.ledger.summary.instruments["loss"]

    assert (found.count, found.least, found.most) == (loss["count"], loss["min"], loss["max"])
    assert found.mean == pytest.approx(loss["mean"])
    assert found.not_finite == loss["not_finite"] == {"nan": 1}
