"""effllm/energy/tick_clock.py: the set of all clocks that explain the reads always contains the true clock."""

import math
import random

import pytest
from builders import NS
from hypothesis import given
from hypothesis import strategies as st

from effllm.energy.tick_clock import TickClock

TICK_NS = NS // 10
START_NS = 1000 * NS


class Counter:
    """A counter with its own ticks; its reads are recorded by the clock."""

    def __init__(self, clock, period_ns=TICK_NS, phase_ns=0.0, jitter_ns=0.0, drift=0.0):
        self.clock = clock
        self._period_ns, self._phase_ns, self._jitter_ns, self._drift = period_ns, phase_ns, jitter_ns, drift
        self._last = None

    def tick_ns(self, number):
        """Return the time of tick `number`; with drift, the period varies by ±`drift` over three hours."""
        since_ns = number * self._period_ns
        turn = 2 * math.pi / (3 * 3600 * NS)
        drifted_ns = self._drift / turn * (1 - math.cos(turn * since_ns))
        jitter_ns = self._jitter_ns * (2 * random.Random(number).random() - 1) if self._jitter_ns else 0.0
        return START_NS + self._phase_ns + since_ns + drifted_ns + jitter_ns

    def number(self, time_ns):
        """Return the number of ticks until this time."""
        number = int((time_ns - START_NS - self._phase_ns) / self._period_ns)
        while self.tick_ns(number) > time_ns:
            number -= 1
        while self.tick_ns(number + 1) <= time_ns:
            number += 1
        return number

    def read(self, *times_ns):
        """Read the counter at these times, and record the reads in the clock, as the ledger does."""
        for time_ns in map(round, times_ns):
            number = self.number(time_ns)
            if self._last is not None:
                record = self.clock.add_change if number > self._last[1] else self.clock.add_no_change
                record(self._last[0], time_ns)
            self._last = (time_ns, number)

    def off_ns(self, time_ns):
        """Return the distance from the clock's last tick before this time to the nearest true tick."""
        middle_ns, _ = self.clock.last_tick_before(time_ns)
        near = self.number(middle_ns)
        return min(abs(middle_ns - self.tick_ns(number)) for number in (near, near + 1))


def reads_of_an_agent(counter, edges_ns):
    """Read once per second and, at each edge, at the times requested by the clock."""
    clock, next_ns = counter.clock, edges_ns[0]
    for edge_ns in edges_ns:
        while next_ns < edge_ns:
            counter.read(next_ns)
            next_ns += NS
        known = clock.last_tick_before(edge_ns)
        if known is None:
            times = [edge_ns + i * TICK_NS // 8 for i in range(18)]
        else:
            tick_ns = known[0] + clock.tick_ns
            times = [edge_ns, *([tick_ns] if known[1] > 1e5 and tick_ns > edge_ns + known[1] else [])]
            times += [tick_ns + TICK_NS / 4, tick_ns + 1.25 * TICK_NS]
        counter.read(*times)
        next_ns = max(next_ns, round(times[-1]) + 1)


def test_counter_change_between_two_near_reads_locks_the_clock():
    clock = TickClock(0.1, 1e-5)
    assert clock.last_tick_before(START_NS) is None

    clock.add_change(START_NS, START_NS + 10_000_000)

    # The tick is within an interval of 10 ms; its estimate is the middle of the interval.  Over two ticks the period's
    # error adds 2 * 10 us.
    assert clock.last_tick_before(START_NS + 10_000_000) == (START_NS + 5_000_000, 5_000_000)
    assert clock.last_tick_before(START_NS + 210_000_000) == pytest.approx((START_NS + 205_000_000, 5_020_000))


@pytest.mark.parametrize("apart_s", [0.06, 1.0])
def test_counter_change_between_distant_reads_does_not_lock_the_clock(apart_s):
    clock = TickClock(0.1, 1e-5)

    clock.add_change(START_NS, START_NS + round(apart_s * NS))

    assert clock.last_tick_before(START_NS + NS) is None
    assert clock.certain_tick_before(START_NS + NS) is None


def test_unchanged_counter_at_a_due_tick_reduces_the_clock_error():
    clock = TickClock(0.1, 0.0)
    clock.add_change(START_NS, START_NS + 10_000_000)

    clock.add_no_change(START_NS + 90_000_000, START_NS + 106_000_000)  # the tick due at 100-110 ms is after 106 ms

    assert clock.last_tick_before(START_NS + 120_000_000) == pytest.approx((START_NS + 108_000_000, 2_000_000))


def test_unchanged_counter_after_a_possible_tick_is_ignored():
    clock = TickClock(0.1, 0.0)
    clock.add_change(START_NS, START_NS + 10_000_000)
    clock.add_change(START_NS + 10_000_000, START_NS + NS + 104_000_000)  # reads too far apart to locate a tick

    clock.add_no_change(START_NS + NS + 104_000_000, START_NS + NS + 106_000_000)  # the tick was due at 100 to 110 ms

    assert clock.last_tick_before(START_NS + NS + 120_000_000) == pytest.approx(
        (START_NS + NS + 105_000_000, 5_000_000)
    )


def test_phase_is_known_to_200_us_after_30_edges():
    clock = TickClock(0.1, 2e-5)
    counter = Counter(clock, TICK_NS * 1.0001, phase_ns=31_700_000)

    reads_of_an_agent(counter, [START_NS + (5 + 10 * i) * NS + i * 7_340_000 for i in range(30)])

    assert clock.num_conflicts == 0
    assert clock.last_tick_before(START_NS + 300 * NS)[1] < 200_000
    assert counter.off_ns(START_NS + 300 * NS) < 200_000


# --- the truth is never excluded ---

#: A read is given by the number of ticks since the last read and by its position relative to the tick. Most reads are
#: near a tick.
READS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 2, 3, 10, 40, 3000, 30_000]),
        st.one_of(st.floats(-0.01, 0.01), st.floats(-0.2, 0.2), st.floats(0.0, 1.0)),
    ),
    min_size=15,
    max_size=60,
)
PARTS = st.floats(0.0, 1.0)


def read_near_ticks(counter, reads):
    """Read at the positions of ``reads``; yield the time of each read."""
    number, last_ns = 100, 0
    for ticks, part in reads:
        number += ticks
        at_ns = round(counter.tick_ns(number) + part * TICK_NS)
        if at_ns > last_ns:
            counter.read(at_ns)
            last_ns = at_ns
            yield at_ns


@given(READS, PARTS, st.floats(-1.0, 1.0), st.sampled_from([1e-5, 2e-4, 0.01]))
def test_true_phase_and_period_are_within_bounds_for_any_reads(reads, phase, off, error):
    clock = TickClock(0.1, 0.1 * error)
    counter = Counter(clock, TICK_NS * (1 + off * error), phase * TICK_NS)

    for at_ns in read_near_ticks(counter, reads):
        for ahead in (0, 1, 7, 100):  # a clock with the right phase and a wrong period fails here
            known = clock.last_tick_before(at_ns + ahead * TICK_NS)
            if known is not None:
                assert counter.off_ns(at_ns + ahead * TICK_NS) <= known[1] + 2

    assert clock.num_conflicts == 0


@given(READS, PARTS, st.floats(-1.0, 1.0), st.lists(PARTS, min_size=1, max_size=9))
def test_time_of_the_last_certain_tick_is_within_its_error(reads, phase, off, moments):
    clock = TickClock(0.1, 2e-5)
    counter = Counter(clock, TICK_NS * (1 + off * 2e-4), phase * TICK_NS)
    *_, last_ns = read_near_ticks(counter, reads)

    for moment in moments:
        moment_ns = last_ns + moment * TICK_NS
        stated = clock.certain_tick_before(moment_ns)
        if stated is not None:  # `stated` must be the last true tick
            assert abs(counter.tick_ns(counter.number(moment_ns)) - stated[0]) <= stated[1] + 2


def test_moments_near_an_uncertain_tick_are_rejected():
    clock = TickClock(0.1, 0.0)
    clock.add_change(START_NS, START_NS + 10_000_000)
    tick_ns = START_NS + 305_000_000  # ± 5 ms

    stated = [ms for ms in range(-20, 100) if clock.certain_tick_before(tick_ns + ms * 1_000_000) is not None]

    assert stated == [*range(-20, -5), *range(6, 95)]


def test_reads_that_fit_two_ticks_do_not_change_the_clock():
    # Ticks are expected from -20 to 20 and from 80 to 120 ms; a change between 15 and 95 ms fits both ticks.
    clock = TickClock(0.1, 0.0)
    clock.add_change(START_NS - 20_000_000, START_NS + 20_000_000)

    clock.add_change(START_NS + 15_000_000, START_NS + 95_000_000)

    assert clock.last_tick_before(START_NS + 150_000_000) == pytest.approx((START_NS + 100_000_000, 20_000_000))
    assert clock.num_conflicts == 0


# --- imperfect clocks ---


def test_clock_unread_for_hours_unlocks_and_locks_again():
    clock = TickClock(0.1, 1e-5)
    counter = Counter(clock, TICK_NS * (1 - 1e-5), 40_000_000)
    reads_of_an_agent(counter, [START_NS + i * 10 * NS for i in range(1, 40)])
    assert clock.last_tick_before(START_NS + 390 * NS) is not None
    later_ns = START_NS + 200 * 3600 * NS

    assert clock.last_tick_before(later_ns) is None
    assert clock.certain_tick_before(later_ns) is None
    counter.read(*(later_ns + i * 12_000_000 for i in range(20)))
    assert clock.last_tick_before(later_ns + 300_000_000) is not None
    assert counter.off_ns(later_ns + 300_000_000) < 6_000_000


@pytest.mark.parametrize("jitter_ns", [2_000_000, 8_000_000])
def test_jittering_ticks_are_conflicts_and_widen_the_bounds(jitter_ns):
    clock = TickClock(0.1, 2e-5)
    counter = Counter(clock, phase_ns=31_700_000, jitter_ns=jitter_ns)

    reads_of_an_agent(counter, [START_NS + (5 + 3 * i) * NS + i * 7_340_000 for i in range(600)])

    assert clock.num_conflicts > 0
    after_ns = START_NS + 1900 * NS
    middle_ns, half_ns = clock.last_tick_before(after_ns)
    assert counter.off_ns(after_ns) <= half_ns + 2 * jitter_ns
    refused = sum(clock.certain_tick_before(middle_ns + i * TICK_NS / 200) is None for i in range(200))
    assert 200 * jitter_ns / TICK_NS < refused < 100


def test_clock_recovers_from_a_counter_that_froze_once():
    clock = TickClock(0.1, 2e-5)
    counter = Counter(clock, phase_ns=31_700_000)
    reads_of_an_agent(counter, [START_NS + (5 + 3 * i) * NS + i * 7_340_000 for i in range(30)])
    tick_ns = round(clock.last_tick_before(START_NS + 100 * NS)[0])
    clock.add_no_change(tick_ns - 40_000_000, tick_ns + 40_000_000)  # no change of the counter, although a tick was due

    def refused(at_ns):
        return sum(clock.certain_tick_before(at_ns + i * TICK_NS / 200) is None for i in range(200))

    assert clock.num_conflicts == 1
    reads_of_an_agent(counter, [START_NS + (110 + 3 * i) * NS + i * 7_340_000 for i in range(30)])
    assert refused(START_NS + 210 * NS) > 100  # the ticks may be wrong by up to 40 ms
    reads_of_an_agent(counter, [START_NS + (300 + 30 * i) * NS + i * 7_340_000 for i in range(100)])
    assert refused(START_NS + 3400 * NS) < 10


def test_clock_follows_temperature_drift_for_days():
    # Crystals drift by one part in a million: a period measured over more than a few minutes would be wrong.
    clock = TickClock(0.1, 2e-5)
    counter = Counter(clock, TICK_NS * 1.0001, phase_ns=31_700_000, drift=1e-6)
    edges_ns = [START_NS + (5 + 30 * i) * NS + i * 7_340_000 for i in range(2 * 24 * 120)]

    reads_of_an_agent(counter, edges_ns)

    assert clock.num_conflicts <= 2
    assert clock.last_tick_before(edges_ns[-1])[1] < 1_000_000
    assert counter.off_ns(edges_ns[-1]) < 1_000_000
