"""job/iteration_losses.py: what waits for data and long iterations cost all ranks, on times known by construction."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.job.health.own_times import CountedWaits, Waits, by_iteration
from effllm.job.iteration_losses import MIN_RECENT, IterationLosses, IterationMatrix
from effllm.records.iteration_times import LONG_RATIO, IterationTimes, codes_of
from effllm.records.verdict import MAX_LAST, LastRanks


def window(number, steps, waits, own=None, first=1, shown=0):
    """Return the reports of a window; the times are by rank and iteration."""
    count = len(steps[0])
    return [
        SimpleNamespace(
            rank=rank, window=number, iteration_first=first, iteration_last=first + count - 1,
            iteration_shown=first + count - 1 + shown, iterations=count,
            times=IterationTimes.of(steps[rank], waits[rank], own[rank] if own else []), phases_s={},
        )
        for rank in range(len(steps))
    ]  # fmt: skip


def synchronous(waits, own, rest=0.02):
    """Return the steps of ranks that leave each iteration together."""
    ends = (np.array(waits) + np.array(own)).max(axis=0) + rest
    return (ends - np.array(waits)).tolist()


times = st.lists(st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5), min_size=3, max_size=3)


def data_of(rows):
    """Return what waits for data cost in a window: rank-seconds of all ranks, with the ranks' own waits."""
    matrix = IterationMatrix.of(rows)
    (lost, *_) = IterationLosses().add_window(matrix)
    return lost.data_s + float(matrix.waits.sum())


@given(waits=times, own=times)
def test_data_waits_cost_what_the_job_saves_without_them(waits, own):
    own = (np.array(own) + 0.001).tolist()
    with_waits = synchronous(waits, own)
    without = np.array(synchronous(np.zeros((3, 5)), own))
    whole = np.array(with_waits) + np.array(waits)

    assert data_of(window(1, with_waits, waits, own)) == pytest.approx((whole - without).sum(), rel=0.01, abs=0.01)


@given(waits=times, own=times, slow=st.sets(st.integers(0, 2)))
def test_parts_of_an_iteration_never_exceed_it(waits, own, slow):
    own = (np.array(own) + 0.001).tolist()
    steps = synchronous(waits, own)
    whole_s = float((np.array(steps) + np.array(waits)).sum())
    matrix = IterationMatrix.of(window(1, steps, waits, own))
    named = np.array(sorted(slow), np.intp)

    lost = Waits.of(by_iteration(matrix, ()), [np.arange(3)], named)

    among_ranks_s = 3 * (lost.straggling_s + lost.uneven_s)
    assert 0.0 <= data_of(window(1, steps, waits, own)) <= whole_s * 1.001 - among_ranks_s + 0.01
    assert min(lost.straggling_s, lost.uneven_s, *lost.last_s) >= 0.0
    assert lost.straggling_s <= lost.max_straggling_s and lost.uneven_s <= lost.max_uneven_s
    assert data_of(window(1, steps, waits)) <= whole_s * 1.001, "without own times"


@given(own=times, slow=st.sets(st.integers(0, 2), max_size=1))
def test_waits_of_ranks_are_what_the_job_saves_with_equal_ranks(own, slow):
    own = np.array(own) + 0.001
    matrix = IterationMatrix.of(window(1, synchronous(np.zeros((3, 5)), own), np.zeros((3, 5)).tolist(), own.tolist()))
    others = np.delete(own, list(slow), axis=0)
    next_s = np.maximum(others.max(axis=0), np.median(own, axis=0))

    lost = Waits.of(by_iteration(matrix, ()), [np.arange(3)], np.array(sorted(slow), np.intp))

    assert lost.straggling_s == pytest.approx((own.max(axis=0) - next_s).sum(), abs=0.01)
    assert lost.uneven_s == pytest.approx((next_s - others.mean(axis=0)).clip(0).sum(), abs=0.01)


def close(losses, *times, **changes):
    """Return what a window costs."""
    return losses.add_window(IterationMatrix.of(window(*times, **changes)))


def counted(own, slow=(), since=None, waits=None):
    """Count a window of two ranks whose second rank has these own times; iterations last 1 s."""
    waits = waits or CountedWaits(LastRanks())
    number = len(waits._kept) + 1
    own = [[0.1] * len(own), own]
    steps = synchronous(np.zeros((2, len(own[0]))), own, rest=1.0 - max(map(max, own)))
    reports = window(number, steps, np.zeros((2, len(own[0]))).tolist(), own, first=1 + 4 * (number - 1))
    times = by_iteration(IterationMatrix.of(reports), ())
    return waits, waits.count_waits(times, [np.arange(2)], 2, slow, since)


def test_waits_for_a_named_rank_are_counted_from_the_window_in_which_it_becomes_slow():
    waits, _ = counted([0.1, 0.1, 0.3, 0.3])
    counted([0.3] * 4, waits=waits)

    _, (lost, *_) = counted([0.3] * 4, slow={1}, since=3, waits=waits)

    assert {one.window: one.straggling_s for one in lost} == pytest.approx({1: 0.8, 2: 1.6, 3: 1.6}, rel=0.01)


def test_all_waits_for_a_rank_while_it_was_the_last_one_are_known_at_most():
    """The second rank takes 0.1 s of 0.2 s longer, so at most 0.5 s of 1 s; the first one at most 0.45 s of 0.9 s."""
    waits, _ = counted([0.2, 0.2, 0.05, 0.2])
    counted([0.2] * 4, slow={1}, since=5, waits=waits)

    assert waits.last_ranks.max_waits_s[1] == pytest.approx(7 * 0.5 * 2, rel=0.01)
    assert waits.last_ranks.max_waits_s[0] == pytest.approx(0.45 * 2, rel=0.01)


def test_ranks_that_are_last_most_often_are_kept():
    last = LastRanks().with_more(100.0, dict.fromkeys(range(MAX_LAST), 1.0), {})

    last = last.with_more(10.0, {999: 10.0}, {999: 5.0})

    assert last.dominant_last_rank == (999, 10.0) and last.max_waits_s[999] == 5.0
    assert len(last.by_rank) == len(last.max_waits_s) == MAX_LAST


def test_long_iterations_are_left_out_of_the_comparison_of_ranks():
    own = [[0.1, 5.0, 0.1], [0.1, 0.1, 0.1]]
    matrix = IterationMatrix.of(window(1, synchronous([[0.0] * 3] * 2, own), [[0.0] * 3] * 2, own))

    found = by_iteration(matrix, (False, True, False))

    assert found.values == pytest.approx(np.full((2, 2), 0.1), rel=1e-3)
    assert by_iteration(matrix, (True, True, True)) is None


def test_waits_of_the_ranks_in_turn_are_added():
    waits = [[0.2, 0, 0, 0], [0, 0.2, 0, 0], [0, 0, 0.2, 0], [0, 0, 0, 0.2]]
    steps = synchronous(waits, [[0.1] * 4] * 4)
    for own in ([[0.1] * 4] * 4, None):
        found = data_of(window(1, steps, waits, own))
        assert found == pytest.approx(4 * 0.8, rel=0.01), "0.2 s in each iteration, for each of four ranks"


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_wait_for_the_checkpoint_of_rank_0_wait_for_a_checkpoint(ranks):
    losses, lost = IterationLosses(), []
    for number in range(8):
        took = np.full((ranks, 5), 0.1)
        took[1:, 2] += 0.8  # rank 0 writes before this iteration, and joins the others at its end
        rows = window(number + 1, took.tolist(), [[0.0] * 5] * ranks, first=5 * number + 1)
        rows[0].phases_s = {"checkpoint": 0.8}
        lost += losses.add_window(IterationMatrix.of(rows))

    assert {one.phase for one in lost} == {"checkpoint", ""}
    assert sum(one.phase_s for one in lost) == pytest.approx(8 * 0.8 * (ranks - 1), rel=0.01)
    assert sum(one.slow_s for one in lost) == 0.0 and losses.long_iterations() is None


def test_waits_of_one_rank_are_counted_alone():
    waits, own = [[0.1] * 4, [0.02] * 4], [[0.1] * 4] * 2
    matrix = IterationMatrix.of(window(1, synchronous(waits, own), waits, own))

    assert matrix.lost_to_data(np.array([0])) == pytest.approx([0.08] * 4, rel=0.01)
    assert matrix.lost_to_data() == pytest.approx([0.1] * 4, rel=0.01)


def train(steps, seed=0, ranks=2, sigma=0.1):
    """Return the losses of a job whose iteration i takes ``steps(i)`` times 0.1 s, and the sums of its windows."""
    losses, chance, sums = IterationLosses(), random.Random(seed), {"slow_s": 0.0, "warmup_s": 0.0}
    for number in range(40):
        took = [0.1 * chance.lognormvariate(0, sigma) * steps(10 * number + at + 1) for at in range(10)]
        for lost in close(losses, number + 1, [took] * ranks, [[0.0] * 10] * ranks, first=10 * number + 1):
            for name in sums:
                sums[name] += getattr(lost, name)
    return losses, sums


def test_pauses_of_all_ranks_are_long_iterations():
    losses, sums = train(lambda i: 7.0 if i % 20 == 0 else 1.0)
    found = losses.long_iterations()

    assert sums["slow_s"] == pytest.approx(2 * 20 * 0.6, rel=0.1)
    assert (found.count, found.of, found.every) == (20, 400, 20)
    assert found.longest % 20 == 0 and found.median_s == pytest.approx(0.1, rel=0.1)
    assert sums["warmup_s"] == 0.0


def test_iterations_after_long_ones_are_long_at_most():
    """A rank that ends an iteration late makes the next one of the others longer: 19 of 20 times, by 20 of 600 ms."""
    losses, _ = train(lambda i: {0: 7.0, 1: 1.2}.get(i % 20, 1.0), sigma=0.0)

    assert losses.long_iterations().max_ratio == pytest.approx(1 + 19 / 20 * 20 / 600, rel=0.01)


def test_rare_waits_are_named():
    losses, often = IterationLosses(), IterationLosses()
    for number in range(10):
        waits = [[0.9 if i == 9 and number % 2 else 0.001 for i in range(10)]] * 2
        close(losses, number + 1, [[0.1] * 10] * 2, waits, first=10 * number + 1)
        close(often, number + 1, [[0.1] * 10] * 2, [[0.2] * 10] * 2, first=10 * number + 1)

    found = losses.rare_waits()
    assert (found.count, found.of, found.every, found.longest) == (5, 100, 20, 20)
    assert often.rare_waits() is None


def test_long_first_iterations_are_the_warmup():
    losses, sums = train(lambda i: 400.0 if i == 1 else 1.0)

    assert sums["warmup_s"] == pytest.approx(2 * 39.9, rel=0.3)
    assert sums["slow_s"] == 0.0 and losses.long_iterations() is None


@pytest.mark.parametrize("sigma", [0.03, 0.1, 0.2, 0.3, 0.4])
def test_noise_is_hardly_long(sigma):
    for seed in range(20):
        _, sums = train(lambda i: 1.0, seed=seed, sigma=sigma)
        assert sums["slow_s"] < 0.05 * 2 * 400 * 0.1, "the threshold of the loss"


def test_iterations_are_judged_when_enough_are_known_and_each_attempt_for_itself():
    losses = IterationLosses()
    assert [lost.slow_s for lost in close(losses, 1, [[0.1] * 9 + [1.0]], [[0.0] * 10], first=11)] == [0.0]
    assert MIN_RECENT == 20
    (own, *judged) = close(losses, 2, [[0.1] * 10], [[0.0] * 10], first=21)
    assert own.window == 2 and [round(one.slow_s, 1) for one in judged] == [0.9, 0.0]
    losses.begin_attempt()
    assert losses.usual_s == []
    assert LONG_RATIO == 2.5


def test_losses_by_means_of_iterations_are_lower_and_upper_bounds(monkeypatch):
    """Each of two ranks waits 0.2 s in other iterations than the other one; whole iterations take 0.3 s."""
    waits = [[0.2, 0.0] * 60, [0.0, 0.2] * 60]
    steps = synchronous(waits, [[0.1] * 120] * 2)
    exact, means = IterationLosses(), IterationLosses()
    sums = []
    for losses, values in ((exact, 1 << 20), (means, 61)):
        monkeypatch.setattr("effllm.job.iteration_losses.MAX_VALUES", values)
        matrix = IterationMatrix.of(window(1, steps, waits))
        sums.append(sum(one.data_s for one in losses.add_window(matrix)) + float((matrix.waits @ matrix.weights).sum()))

    whole, least = sums
    assert whole == pytest.approx(120 * 2 * 0.2, rel=0.01)
    assert least == pytest.approx(120 * 2 * 0.1, rel=0.01)
    assert least <= whole <= 1.001 * (least + means.hidden_data_s)
    assert (exact.in_means, means.in_means, exact.hidden_data_s) == (0, 120, 0.0)


def test_waits_for_each_other_in_means_have_an_upper_bound(monkeypatch):
    """Two ranks work 0.3 s in turn, the other one 0.1 s; iterations take 0.35 s, and two are one column."""
    own = [[0.3, 0.1] * 60, [0.1, 0.3] * 60]
    groups, named = [np.arange(2)], np.array([], np.intp)
    found = []
    for values in (1 << 20, 60):
        monkeypatch.setattr("effllm.job.iteration_losses.MAX_VALUES", values)
        matrix = IterationMatrix.of(window(1, [[0.35] * 120] * 2, [[0.0] * 120] * 2, own))
        found.append(Waits.of(by_iteration(matrix, ()), groups, named))

    exact, means = found
    assert exact.uneven_s == pytest.approx(120 * 0.1, rel=0.01)
    assert means.uneven_s == pytest.approx(0.0, abs=0.1)
    assert exact.max_uneven_s <= means.max_uneven_s == pytest.approx(120 * 0.30, rel=0.01)


def test_waits_of_one_rank_in_means_cost_the_others_as_much_as_in_single_iterations(monkeypatch):
    """Two of three ranks wait 0.2 s for the third one in each of 12 iterations, of which 4 columns are made."""
    waits = [[0.2] * 12, [0.0] * 12, [0.0] * 12]
    rows = window(1, synchronous(waits, [[0.1] * 12] * 3), waits)
    monkeypatch.setattr("effllm.job.iteration_losses.MAX_VALUES", 12)

    (lost, *_) = IterationLosses().add_window(IterationMatrix.of(rows))

    assert lost.data_s == pytest.approx(2 * 12 * 0.2, rel=0.01)


def test_columns_of_a_large_window_are_joined(monkeypatch):
    monkeypatch.setattr("effllm.job.iteration_losses.MAX_VALUES", 8)
    matrix = IterationMatrix.of(window(1, [[0.1, 0.3, 0.2, 0.2, 0.5]] * 2, [[0.0] * 5] * 2, [[0.1] * 5] * 2))

    assert matrix.weights.tolist() == [2.0, 2.0, 1.0] and matrix.has_means
    assert matrix.steps == pytest.approx(np.array([[0.2, 0.2, 0.5]] * 2), rel=1e-3)
    assert matrix.own.shape == matrix.waits.shape == (2, 3)


def test_long_iterations_in_means_keep_their_time():
    losses = IterationLosses()
    for number in range(30):
        took = [[0.1, 0.1, 4.0 if number == 20 else 0.1, 0.1]] * 2
        rows = window(number + 1, took, [[0.0] * 4] * 2, first=4 * number + 1)
        means = codes_of([sum(took[0][:2]) / 2, sum(took[0][2:]) / 2])
        for row in rows:
            row.times = IterationTimes(means, each=2)
        lost = losses.add_window(IterationMatrix.of(rows))
        if number == 20:
            assert sum(one.slow_s for one in lost) == pytest.approx(2 * 3.9, rel=0.01)
    assert losses.iterations == 120 and losses.long_iterations().count == 1


def test_reports_without_times_and_of_other_iterations_are_left_out():
    rows = window(1, [[0.1] * 4] * 3, [[0.1] * 4] * 3)
    rows[2].times = None
    assert IterationMatrix.of(rows).num_ranks == 3
    rows[1].iteration_first, rows[1].iteration_last = 2, 5
    assert IterationMatrix.of(rows) is not None, "of two kinds, one is taken"
    rows[0].times = rows[1].times = None
    assert IterationMatrix.of(rows) is None


@pytest.mark.parametrize(
    "times",
    [
        IterationTimes(b"\x01" * 7), IterationTimes(b"\x01" * 10), IterationTimes(b"\x01" * 8, b"\x01" * 2),
        IterationTimes(b"\x01" * 8, b"", b"\x01" * 6), IterationTimes(b"\xff" * 8, b"\xff" * 8, b"\xff" * 8),
    ],
)  # fmt: skip
def test_times_of_a_hostile_rank_end_nothing(times):
    rows = window(1, [[0.1] * 4] * 3, [[0.0] * 4] * 3, [[0.05] * 4] * 3)
    rows[0].times = times
    losses = IterationLosses()
    losses.add_window(IterationMatrix.of(rows))

    assert losses.pending[0].ranks == 3
