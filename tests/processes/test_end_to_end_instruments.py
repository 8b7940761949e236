"""Values of instruments in the run folder: from the training process to the files, over ranks and windows."""

import statistics

import pytest

RANKS = 2
LOSSES = [float(rank + iteration) for rank in range(RANKS) for iteration in range(1, 21)]


@pytest.fixture
def ledger(launch):
    aggregator = launch.aggregator()
    for rank in launch.ranks(aggregator, RANKS, "instruments_loop.py"):
        rank.done()
    aggregator.job.done()
    return aggregator.ledger


def test_values_of_all_ranks_are_in_summary_and_windows(ledger):
    loss, windows = ledger.summary.instruments["loss"], ledger.windows

    assert (loss.count, loss.total, loss.least, loss.most) == (40, sum(LOSSES), 1.0, 21.0)
    assert loss.std == pytest.approx(statistics.stdev(LOSSES))
    assert loss.not_finite == {"nan": RANKS}
    assert loss.percentiles["p50"] == pytest.approx(statistics.median(LOSSES), abs=0.5)
    assert [window.instruments["loss"].total for window in windows[:2]] == [120.0, 320.0]
    assert {name: one.count for name, one in ledger.summary.instruments.items()} == {
        "loss": 40, "only/0": 20, "only/1": 20,
    }  # fmt: skip
