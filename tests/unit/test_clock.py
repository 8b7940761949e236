import random

import pytest
from cases import cases

from effllm.job.health.clock import DRIFT, MAX_EXCHANGES, PACE_S, Exchanges, aged

MS, S = 1_000_000, 1_000_000_000


def exchange(clocks, sent_ns, there_ns, held_ns, back_ns, ahead_ns=0):
    """Make one exchange with these delays; the other end's clock is ahead by ``ahead_ns``."""
    assert clocks.ask(sent_ns) == sent_ns
    received_ns = sent_ns + there_ns + ahead_ns
    heard_ns = sent_ns + there_ns + held_ns + back_ns
    assert clocks.add(sent_ns, received_ns, received_ns + held_ns, heard_ns)
    return heard_ns


def test_offset_is_exact_with_equal_delays():
    clocks = Exchanges(2)

    heard_ns = exchange(clocks, 7 * S, 3 * MS, 40 * MS, 3 * MS, ahead_ns=1000 * S)

    # received - sent is 1000.003 s and answered - heard is 999.997 s
    assert clocks.offset(heard_ns).offset_s == pytest.approx(1000.0, abs=1e-9)
    # The error is half of the network delay of 6 ms, plus a drift of 0.6 us; the 40 ms at the other end do not count.
    assert clocks.offset(heard_ns).error_s == pytest.approx(3.0006e-3)


def test_offset_with_unequal_delays_is_within_the_error():
    clocks = Exchanges(2)

    heard_ns = exchange(clocks, 7 * S, 9 * MS, 0, 1 * MS, ahead_ns=-5 * S)

    offset = clocks.offset(heard_ns)
    assert offset.offset_s == pytest.approx(-5.0 + 4e-3)  # the estimate is (9 - 1) / 2 ms too large
    assert abs(offset.offset_s + 5.0) <= offset.error_s == pytest.approx(5.001e-3)


def test_shortest_of_the_last_sixteen_round_trips_is_used():
    clocks = Exchanges(2)
    exchange(clocks, 1 * S, MS, 0, MS)
    for i in range(15):
        heard_ns = exchange(clocks, (2 + i) * S, 50 * MS, 0, 90 * MS)
    # In 15 s the error of the first exchange has grown from 1 to 2.5 ms, and is still the smallest.
    assert clocks.offset(heard_ns).error_s == pytest.approx(1e-3 + DRIFT * (heard_ns - 1 * S) / S, abs=1e-6)

    heard_ns = exchange(clocks, 17 * S, 50 * MS, 0, 90 * MS)  # the seventeenth exchange replaces the first

    assert clocks.offset(heard_ns).error_s == pytest.approx(70e-3, abs=1e-3)


def test_error_of_an_estimate_grows_with_its_age():
    clocks = Exchanges(2)
    heard_ns = exchange(clocks, 1 * S, MS, 0, MS)

    assert clocks.offset(heard_ns + 30 * S).error_s == pytest.approx(1e-3 + 3e-3, abs=1e-6)  # 100 ppm of 30 s
    assert aged(1e-3, 30.0) == pytest.approx(4e-3)


def test_exchanges_that_contradict_the_newest_exchange_are_dropped():
    clocks = Exchanges(2)
    for i in range(4):
        exchange(clocks, (1 + i) * S, MS, 0, MS)

    heard_ns = exchange(
        clocks, 6 * S, 2 * MS, 0, 2 * MS, ahead_ns=3600 * S
    )  # the other clock was set, or another process answers

    assert clocks.offset(heard_ns).offset_s == pytest.approx(3600.0)


@cases("seed", range(20))
def test_true_offset_is_within_the_error_on_any_network(seed):
    luck = random.Random(seed)
    clocks, ahead_ns, rate = Exchanges(2), luck.randrange(-(10**15), 10**15), luck.uniform(-DRIFT, DRIFT)
    now_ns = 10**12
    for _ in range(60):
        now_ns += luck.randrange(1 * MS, 4 * S)
        ways = [round(luck.lognormvariate(0, 2) * 0.1 * MS) for _ in range(3)]
        now_ns = exchange(clocks, now_ns, *ways, ahead_ns=ahead_ns + round(rate * (now_ns - 10**12)))
        now_ns += luck.randrange(0, 4 * S)

        offset = clocks.offset(now_ns)
        truth_s = (ahead_ns + rate * (now_ns - 10**12)) * 1e-9

        assert abs(offset.offset_s - truth_s) <= offset.error_s * 1.0001 + 1e-9


def test_unsolicited_answer_is_ignored():
    clocks = Exchanges(2)
    clocks.ask(1 * S)

    assert not clocks.add(2 * S, 0, 0, 3 * S)  # there was no question at 2 s
    assert not clocks.add(1 * S, 5, 4, 3 * S)  # the answer's time is before the receive time
    assert not clocks.add(1 * S, 4, 5, 3 * S)  # second answer to the question at 1 s
    assert clocks.offset(3 * S) is None


def test_early_or_late_answer_is_ignored():
    clocks = Exchanges(2)
    clocks.ask(1 * S)
    assert not clocks.add(1 * S, 0, 0, 1 * S - 1)
    clocks.ask(2 * S)
    assert not clocks.add(2 * S, 0, 0, 13 * S)

    assert clocks.offset(13 * S) is None


def test_exchanges_are_less_frequent_after_the_first_sixteen():
    clocks = Exchanges(2)
    assert clocks.due_s(1.0) == 1.0

    for i in range(MAX_EXCHANGES):
        assert clocks.due_s(0.0) == pytest.approx(1.0 + 0.25 * i)
        exchange(clocks, round(clocks.due_s(0.0) * S), 1, 1, 1)

    clocks.ask(10 * S)
    assert clocks.due_s(0.0) == 10 + PACE_S


def test_exchange_rate_of_ten_thousand_ranks_is_bounded():
    ranks = [Exchanges(10_000, rank) for rank in range(0, 10_000, 7)]
    first = [clocks.due_s(0.0) for clocks in ranks]
    assert min(first) < 0.4 and 19.0 < max(first) < 20.0  # the ranks are spread over the first 20 s

    for i in range(MAX_EXCHANGES + 1):
        exchange(ranks[0], 100 * S * (i + 1), 1, 1, 1)
    ranks[0].ask(2000 * S)
    assert ranks[0].due_s(0.0) == 2050.0  # 10,000 ranks in 50 s


def test_new_aggregator_resets_the_exchanges():
    clocks = Exchanges(2)
    clocks.ask(1 * S)
    exchange(clocks, 2 * S, 1, 1, 1)

    clocks.forget()

    assert clocks.offset(3 * S) is None
    assert not clocks.add(1 * S, 1, 1, 3 * S)
    assert clocks.due_s(5.0) == 5.0
