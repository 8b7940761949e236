"""effllm/agent/window.py: samples and records become exact sums and covered seconds."""

import tracemalloc
from itertools import pairwise

import pytest
from builders import GIB, MADE_NS, NS, amount, gpu, looping
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from effllm.agent.series import Series
from effllm.agent.window import WindowCutter
from effllm.records.energy import EnergyAmount
from effllm.records.rank import CLOCK_RATIO, TENSOR_CLOCK, Integrals, Sample

GAP_S = 5.0


def series(*samples, gap_s=GAP_S):
    one = Series(gpu(), gap_s)
    for sample in samples:
        one.add_sample(sample)
    return one


def cutter(log_interval=10, offset=0, origin_ns=MADE_NS):
    return WindowCutter("agent", 0, log_interval, offset, origin_ns, 1_700_000_000.0)


def cut_all(slots, samples, end_ns, **arguments):
    """Return the reports of a whole run, with the windows of its only device."""
    one, all_series = cutter(**arguments), [series(*samples)]
    for slot in slots:
        one.add_record(slot)
    rows = []
    while (cut := one.take_report(all_series)) is not None:
        rows.append(cut)
    rows.append(one.take_last_report(all_series, end_ns))
    return rows


def steady(until_s, every_s=1.0, watts=100.0, start_ns=MADE_NS):
    """Return samples of constant readings, from MADE_NS until shortly after ``until_s``."""
    count = int(until_s / every_s) + 2
    times = [start_ns + int(i * every_s * NS) for i in range(count)]
    return [Sample(at, GIB, 0.5, watts, watts * (at - start_ns) / NS) for at in times]


#: Fields that are summed; variances at edges are not summed.
SUMS = [name for name in Integrals.__struct_fields__ if name != "energy"]
ENERGY_SUMS = [name for name in EnergyAmount.__struct_fields__ if not name.endswith("_j2")]

# --- integrals ---------------------------------------------------------------------------------

WATTS = st.integers(0, 1_000_000).map(lambda milliwatts: milliwatts / 1000)  # sensors report whole milliwatts
#: Watts per second: after the longest sequence of steps, power is below UNLIMITED_W, above which no reading is used.
SLOPES = st.integers(0, 150_000).map(lambda milliwatts: milliwatts / 1000)
STEPS_MS = st.lists(st.integers(1, 4000), min_size=2, max_size=30)


@given(STEPS_MS, WATTS, SLOPES, st.data())
def test_linear_power_and_memory_integrals_are_exact(steps_ms, base, slope, data):
    # p(t) = base + slope t, whose integral over [a, b] is (b - a) (p(a) + p(b)) / 2.
    times = [0]
    for step in steps_ms:
        times.append(times[-1] + step)
    a, b = sorted(data.draw(st.tuples(st.integers(0, times[-1]), st.integers(0, times[-1]))))
    samples = [Sample(t * 1_000_000 + 1, base + slope * t / 1000, None, base + slope * t / 1000) for t in times]

    found = series(*samples).integrals(a * 1_000_000 + 1, b * 1_000_000 + 1)

    seconds = (b - a) / 1000
    expected = seconds * (base + slope * (a + b) / 2000)
    assert (found.energy.covered_s, found.memory_covered_s) == (pytest.approx(seconds), pytest.approx(seconds))
    assert (found.energy.joules or 0.0) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert (found.memory_byte_seconds or 0.0) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(STEPS_MS, st.data())
def test_integrals_of_adjacent_intervals_add_up_for_any_reading(steps_ms, data):
    reading = st.none() | WATTS
    samples, at_ns = [], 1
    for step in steps_ms:
        samples.append(Sample(at_ns, *data.draw(st.tuples(reading, reading, reading, reading))))
        at_ns += step * 2_000_000  # samples are up to 8 s apart, so gaps occur
    edges = [1, *sorted(data.draw(st.lists(st.integers(2, at_ns), max_size=4))), at_ns + 1]
    one = series(*samples)

    total = one.integrals(1, at_ns + 1)
    parts = Integrals()
    for a, b in pairwise(edges):
        parts = parts + one.integrals(a, b)

    pairs = {name: (getattr(parts, name), getattr(total, name)) for name in SUMS}
    pairs |= {name: (getattr(parts.energy, name), getattr(total.energy, name)) for name in ENERGY_SUMS}
    for name, (part, whole) in pairs.items():
        assert (part is None) == (whole is None), name
        assert (part or 0.0) == pytest.approx(whole or 0.0, rel=1e-9, abs=1e-9), name


def test_utilization_is_the_mean_since_the_previous_sample():
    one = series(Sample(1), Sample(2 * NS + 1, utilization=0.25), Sample(3 * NS + 1, utilization=1.0))

    found = one.integrals(1 * NS + 1, 3 * NS + 1)

    assert (found.utilization_seconds, found.utilization_covered_s) == (0.25 + 1.0, 2.0)


def test_readings_rarer_than_windows_cover_all_time_once():
    one, windows = series(gap_s=30.0), []
    arrives = {1: Sample(NS // 2, utilization=0.9), 6: Sample(11 * NS // 2, GIB, utilization=0.2)}
    arrives |= {11: Sample(21 * NS // 2, GIB, utilization=0.6)}
    for end in range(1, 13):
        if end in arrives:
            one.add_sample(arrives[end])
        windows.append(one.take_window((end - 1) * NS, end * NS, {}).wall)
        one.forget_before(end * NS)

    assert sum(wall.utilization_covered_s for wall in windows) == pytest.approx(10.0)
    assert sum(wall.utilization_seconds or 0.0 for wall in windows) == pytest.approx(5 * 0.2 + 5 * 0.6)
    assert sum(wall.memory_covered_s for wall in windows) == pytest.approx(5.0)


def test_late_reading_covers_no_phase_of_an_earlier_window():
    one = series(Sample(NS // 2, utilization=0.9), gap_s=30.0)
    one.take_window(0, NS, {})
    one.take_window(NS, 3 * NS, {}, [(NS, 2 * NS)])
    one.add_sample(Sample(7 * NS // 2, utilization=0.4))

    wall = one.take_window(3 * NS, 4 * NS, {}).wall
    assert wall.utilization_covered_s == pytest.approx(0.5 + 1.0 + 0.5)


def test_failed_reading_is_a_gap_and_not_zero():
    readings = [100.0, 100.0, None, 100.0, 100.0]
    one = series(*[Sample(i * NS + 1, memory_bytes=r, power_w=r) for i, r in enumerate(readings)])

    found = one.integrals(1, 4 * NS + 1)

    assert (found.energy.joules, found.energy.covered_s) == (200.0, 2.0)
    assert (found.memory_byte_seconds, found.memory_covered_s) == (200.0, 2.0)


def test_long_gap_affects_every_integral_except_the_counter():
    one = series(Sample(1, 7.0, 0.5, 100.0, 0.0), Sample(10 * NS + 1, 7.0, 0.5, 100.0, 1234.0), gap_s=5.0)

    assert one.integrals(1, 10 * NS + 1) == Integrals(amount(1234.0, 10.0))


def test_unread_quantity_is_none_and_has_no_coverage():
    assert series().integrals(1, NS) == Integrals()
    assert series(Sample(1), Sample(NS)).integrals(1, NS) == Integrals()
    assert series(*steady(3)).integrals(10 * NS, 20 * NS) == Integrals()


def test_a_sample_that_is_not_newer_is_dropped():
    one = series(Sample(2 * NS, power_w=1.0), Sample(2 * NS, power_w=9.0), Sample(NS, power_w=9.0))

    assert (one.samples[0].time_ns, one.newest_ns) == (2 * NS, 2 * NS)
    assert one.peak(0, 3 * NS, "power_w") == 1.0


def test_mean_memory_is_at_most_the_peak_of_any_period():
    """The reading after a short period may be far above all readings in it, and a mean includes the way there."""
    one = series(*[Sample(i * NS + 1, memory_bytes=level) for i, level in enumerate([1.0, 1.0, 9.0, 2.0, 8.0])])

    for start_s, end_s in [(0.0, 1.9), (0.2, 1.5), (1.1, 1.9), (1.5, 2.5), (2.1, 3.9), (0.0, 4.0)]:
        period = int(start_s * NS) + 1, int(end_s * NS) + 1
        found = one.integrals(*period)
        assert found.memory_byte_seconds / found.memory_covered_s <= one.peak(*period, "memory_bytes") <= 9.0


def test_dropped_samples_do_not_change_later_integrals():
    one = series(*steady(10))
    before = one.integrals(MADE_NS + int(4.5 * NS), MADE_NS + 8 * NS)

    one.forget_before(MADE_NS + int(4.5 * NS))

    assert one.integrals(MADE_NS + int(4.5 * NS), MADE_NS + 8 * NS) == before
    assert one.samples[0].time_ns == MADE_NS + 4 * NS


def test_difference_of_integrals_is_never_negative():
    # As floats, 0.1 + 0.2 > 0.3, and a frame with a negative integral would be rejected.
    whole = Integrals(amount(0.3, 3.0), 0.3, 3.0, 0.3, 3.0)
    part = Integrals(amount(0.1 + 0.2, 1.0), 0.1 + 0.2, 1.0, 0.1 + 0.2, 1.0)

    assert whole - part == Integrals(amount(0.0, 2.0), 0.0, 2.0, 0.0, 2.0)


# --- windows -----------------------------------------------------------------------------------


def iterate(loop, count, step_s=1.0, wait_s=0.5, tokens=100, samples=4):
    for _ in range(count):
        start_ns = loop.now_ns + int(wait_s * NS)
        loop.start(start_ns)
        loop.end(start_ns + int(step_s * NS), tokens, samples)


def test_report_begins_at_the_end_of_the_previous_report():
    with looping(log_interval=2) as loop:
        iterate(loop, 5)
        loop.recorder.finish()
        rows = cut_all(loop.slots(), steady(10), loop.now_ns + NS, log_interval=2)

    # Iterations end at 1.5, 3, 4.5, 6 and 7.5 s; the run ends a second later.
    assert [(r.window, r.iteration_first, r.iteration_last) for r in rows] == [(1, 1, 2), (2, 3, 4), (3, 5, 5)]
    assert [r.final for r in rows] == [False, False, True]
    assert [r.wall_s for r in rows] == pytest.approx([3.0, 3.0, 2.5])
    assert [r.tokens for r in rows] == [200, 200, 100]
    assert [r.devices[0].wall.energy.joules for r in rows] == pytest.approx([300.0, 300.0, 250.0])
    assert [r.sequence for r in rows] == [1, 2, 3]


def test_start_up_and_shut_down_are_phases_with_own_joules():
    with looping() as loop:
        loop.phase("checkpoint", MADE_NS + 1 * NS, MADE_NS + 2 * NS)  # the job loads a checkpoint before iteration 1
        loop.now_ns = MADE_NS + 3 * NS
        iterate(loop, 2)  # 3.5 to 6 s
        loop.phase("checkpoint", MADE_NS + 6 * NS, MADE_NS + 7 * NS)  # the job saves a checkpoint after iteration 2
        loop.recorder.finish()
        (row,) = cut_all(loop.slots(), steady(10), MADE_NS + 9 * NS)

    assert row.phases_s == pytest.approx({"checkpoint": 2.0, "startup": 2.5, "shutdown": 2.0})
    assert (row.busy_s, row.wait_s, row.wall_s) == pytest.approx((2.0, 0.5, 9.0))
    joules = {name: part.energy.joules for name, part in row.devices[0].phases.items()}
    assert joules == pytest.approx({"checkpoint": 200.0, "startup": 250.0, "shutdown": 200.0})
    assert row.devices[0].iterations.energy.joules == pytest.approx(250.0)


def test_run_without_iterations_has_only_start_up_and_phases():
    with looping() as loop:
        loop.phase("other", MADE_NS + NS, MADE_NS + 2 * NS)
        loop.recorder.finish("failed")
        (row,) = cut_all(loop.slots(), steady(10), MADE_NS + 5 * NS)

    assert (row.iterations, row.final) == (0, True)
    assert row.phases_s == pytest.approx({"other": 1.0, "startup": 4.0})
    assert row.devices[0].phases["startup"].energy.joules == pytest.approx(400.0)


def test_windows_end_at_multiples_of_the_interval_after_a_resume():
    with looping(log_interval=10, offset=25) as loop:
        iterate(loop, 7)  # 26 to 32
        rows = cut_all(loop.slots(), steady(20), loop.now_ns, log_interval=10, offset=25)

    assert [(r.window, r.iteration_shown, r.iterations) for r in rows] == [(3, 30, 5), (4, 32, 2)]


def test_totals_that_fall_and_repeated_iterations_make_no_report_negative():
    """A signal handler or another thread may record an iteration in the middle of another one."""
    with looping(log_interval=2) as loop:
        iterate(loop, 6)
        slots = loop.slots()
    third = slots[2]
    slots[2] = third._replace(wait_ns=0, step_ns=0, counts=(0,) * len(third.counts))
    slots.insert(3, slots[2])
    rows = cut_all(slots, steady(20), loop.now_ns, log_interval=2)

    assert [row.iterations for row in rows] == [2, 2, 2, 0]
    assert [row.tokens for row in rows] == [200, 200, 200, 0]
    assert min(min(row.busy_s, row.wait_s, *row.phases_s.values(), 0.0) for row in rows) == 0.0


def test_logged_iteration_number_is_shown_and_changes_no_window():
    with looping(log_interval=2) as loop:
        iterate(loop, 1)
        loop.recorder.record_loss(5001, None)
        iterate(loop, 1)
        rows = cut_all(loop.slots(), steady(10), loop.now_ns, log_interval=2)

    assert (rows[0].window, rows[0].iteration_last, rows[0].iteration_shown) == (1, 2, 5002)


@cases(
    ("losses", "expected"),
    [
        ((4.0, 3.0, 2.0), [(3.0, 0, None), (2.0, 0, None)]),
        *(((bad, bad, 2.0), [(None, 2, 41), (2.0, 0, None)]) for bad in map(float, ("inf", "-inf", "nan"))),
        ((None, 2.0, None), [(2.0, 0, None), (None, 0, None)]),
    ],
)
def test_loss_after_the_end_of_an_iteration_is_in_its_window(losses, expected):
    with looping(log_interval=2) as loop:
        for loss in losses:
            iterate(loop, 1)
            loop.recorder.record_loss(40 + loop.recorder.ordinal, loss)
        rows = cut_all(loop.slots(), steady(10), loop.now_ns, log_interval=2)

    assert [(row.loss, row.losses_not_finite, row.first_not_finite) for row in rows] == expected


@pytest.mark.parametrize(("before", "resets"), [(3, [False, True, False, False]), (2, [True, False, False, False])])
def test_reset_is_reported_in_the_window_of_the_last_iteration(before, resets):
    with looping(log_interval=2) as loop:
        iterate(loop, before)
        loop.recorder.reset()
        iterate(loop, 6 - before)
        rows = cut_all(loop.slots(), steady(10), loop.now_ns, log_interval=2)

    assert [row.reset for row in rows] == resets


def test_overwritten_boundary_makes_the_next_window_longer():
    with looping(log_interval=2, slots=64) as loop:
        iterate(loop, 6)
        slots = [slot for slot in loop.slots() if slot.ordinal not in (3, 4)]  # the second window's
        rows = cut_all(slots, steady(10), loop.now_ns, log_interval=2)

    assert [(r.window, r.iteration_first, r.iteration_last) for r in rows[:2]] == [(1, 1, 2), (3, 3, 6)]
    assert [r.tokens for r in rows] == [200, 400, 0]
    assert [r.busy_s for r in rows] == pytest.approx([2.0, 4.0, 0.0])
    assert [r.iterations_overrun for r in rows] == [0, 2, 0], "those of the row, not of the run"


def test_first_window_includes_records_from_before_the_agent_start():
    with looping() as loop:
        loop.phase("checkpoint", MADE_NS + 1 * NS, MADE_NS + 2 * NS)
        iterate(loop, 1)
        (row,) = cut_all(loop.slots(), steady(10), loop.now_ns, origin_ns=MADE_NS + int(1.5 * NS))

    assert row.wall_s == pytest.approx(row.busy_s + row.wait_s + sum(row.phases_s.values()))
    assert row.wall_s == pytest.approx(2.5)


def test_unix_times_are_monotonic_times_plus_an_offset():
    with looping(log_interval=1) as loop:
        iterate(loop, 1, step_s=2.0, wait_s=0.0)
        rows = cut_all(loop.slots(), [], loop.now_ns, log_interval=1)

    assert rows[0].end_time_s - rows[0].start_time_s == pytest.approx(2.0, abs=1e-6)
    assert rows[0].end_time_s == pytest.approx(1_700_000_002.000001, abs=1e-6)
    assert rows[0].devices[0].wall == Integrals()


def test_peaks_are_the_largest_readings_of_the_window():
    with looping(log_interval=1) as loop:
        iterate(loop, 2, step_s=2.0, wait_s=0.0)
        readings = enumerate([(1, 10), (3, 20), (2, 90), (1, 5), (0, 7)])
        samples = [Sample(MADE_NS + i * NS, memory * GIB, None, power) for i, (memory, power) in readings]
        rows = cut_all(loop.slots(), samples, loop.now_ns, log_interval=1)

    peaks = [(row.devices[0].memory_peak_bytes, row.devices[0].power_peak_w) for row in rows[:2]]
    assert peaks == [(3 * GIB, 90), (2 * GIB, 90)]


@pytest.mark.long
def test_cutter_keeps_no_data_of_cut_windows():
    with looping(log_interval=1, slots=16) as loop:
        one, device = cutter(log_interval=1), series()

        def iterations(count):
            for _ in range(count):
                iterate(loop, 1)
                device.add_sample(Sample(loop.now_ns, 1.0, 0.5, 100.0, 0.0))
                loop.recorder.record_loss(1, 3.0)
                loop.phase("evaluation", loop.now_ns, loop.now_ns + NS)
                for slot in loop.slots():
                    one.add_record(slot)
                assert one.take_report([device]) is not None

        tracemalloc.start()
        try:
            iterations(2500)  # not measured: during these iterations, Python keeps up to 2000 tuples for reuse
            before, _ = tracemalloc.get_traced_memory()
            iterations(2000)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert after - before < 20_000


# --- properties of every run --------------------------------------------------------------------

MILLISECONDS = st.integers(0, 3000)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["iteration"] * 6 + ["evaluation", "checkpoint", "around", "inside"]),
        MILLISECONDS,
        st.integers(1, 3000),
    ),
    min_size=1,
    max_size=25,
)


def play(loop, events):
    """Run a loop of events: (kind, pause before the event, length), in ms."""
    for kind, pause, length in events:
        at_ns, length_ns = loop.now_ns + pause * 1_000_000, length * 1_000_000
        if kind in ("evaluation", "checkpoint"):
            loop.phase(kind, at_ns, at_ns + length_ns)
            continue
        if kind == "around":  # a phase from before the iteration until the middle of the iteration
            loop.now_ns = at_ns - pause * 500_000
            loop.recorder.phase_start("evaluation")
        loop.start(at_ns)
        if kind == "around":
            loop.now_ns = at_ns + length_ns // 2
            loop.recorder.phase_end()
        if kind == "inside":
            loop.phase("checkpoint", at_ns + length_ns // 4, at_ns + length_ns // 2)
        loop.end(at_ns + length_ns, length, pause % 7)
    loop.recorder.finish()


@st.composite
def runs(draw):
    """Return the records of a run, samples that cover it, and its end."""
    with looping() as loop:
        play(loop, draw(EVENTS))
        slots, end_ns = loop.slots(), loop.now_ns + draw(MILLISECONDS) * 1_000_000
    samples, at_ns, counter = [], MADE_NS, 0.0
    steps, watts = draw(st.lists(st.integers(50, 3000), min_size=1)), draw(st.lists(WATTS, min_size=1))
    i = 0
    while not samples or samples[-1].time_ns <= end_ns:
        power_w = watts[i % len(watts)]
        samples.append(Sample(at_ns, GIB * (1 + i % 5), 0.1 * (i % 10), power_w, counter))
        counter += power_w * steps[i % len(steps)] / 1000
        at_ns += steps[i % len(steps)] * 1_000_000
        i += 1
    return slots, samples, end_ns


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-6)  # the inputs are in ns, the results in s and J


@given(runs(), st.integers(1, 12))
def test_each_second_and_joule_of_a_report_is_in_one_class(run, log_interval):
    slots, samples, end_ns = run

    rows = cut_all(slots, samples, end_ns, log_interval=log_interval)

    for row in rows:
        window = row.devices[0]
        assert row.wall_s == close(row.busy_s + row.wait_s + sum(row.phases_s.values()))
        assert min(row.busy_s, row.wait_s, *row.phases_s.values(), 0.0) == 0.0
        assert window.wall.energy.covered_s == close(row.wall_s)
        # The integrals of each class cover exactly the seconds of the class, so no joule is in two classes.
        for name, seconds in row.phases_s.items():
            assert window.phases[name].energy.covered_s == close(seconds), name
        assert window.iterations.energy.covered_s == close(row.time_s)
        parts = [part.energy.joules or 0.0 for part in window.phases.values()]
        assert (window.wall.energy.joules or 0.0) == close(sum(parts) + (window.iterations.energy.joules or 0.0))


@given(runs(), st.integers(1, 12))
def test_reports_cover_the_run_without_gaps(run, log_interval):
    slots, samples, end_ns = run

    rows = cut_all(slots, samples, end_ns, log_interval=log_interval)

    assert sum(row.wall_s for row in rows) == close((end_ns - MADE_NS) / NS)
    for first, second in pairwise(rows):
        assert first.end_time_s == second.start_time_s
        assert first.iteration_last + 1 == second.iteration_first
        assert first.window < second.window


@given(runs(), st.integers(2, 12))
def test_totals_do_not_depend_on_the_length_of_windows(run, log_interval):
    slots, samples, end_ns = run

    def totals(rows):
        walls, parts = [row.devices[0].wall for row in rows], [row.devices[0].iterations for row in rows]
        return {
            **{name: sum(getattr(row, name) for row in rows) for name in ("tokens", "samples", "iterations")},
            **{name: sum(getattr(row, name) for row in rows) for name in ("wall_s", "busy_s", "wait_s")},
            "phases": sum(sum(row.phases_s.values()) for row in rows),
            **{name: sum(getattr(wall, name) or 0.0 for wall in walls) for name in SUMS},
            **{name: sum(getattr(wall.energy, name) or 0.0 for wall in walls) for name in ENERGY_SUMS},
            "energy of iterations": sum(part.energy.joules or 0.0 for part in parts),
        }

    one = totals(cut_all(slots, samples, end_ns, log_interval=1))
    many = totals(cut_all(slots, samples, end_ns, log_interval=log_interval))

    assert many == {name: pytest.approx(value, rel=1e-9, abs=1e-6) for name, value in one.items()}


@given(runs(), st.integers(1, 4))
def test_reports_made_during_a_run_equal_reports_made_at_its_end(run, log_interval):
    slots, samples, end_ns = run
    live, rows = cutter(log_interval), []
    one = series(*samples)
    for slot in slots:
        live.add_record(slot)
        if (cut := live.take_report([one])) is not None:
            rows.append(cut)
    rows.append(live.take_last_report([one], end_ns))

    assert rows == cut_all(slots, samples, end_ns, log_interval=log_interval)


def test_report_has_generated_tokens_and_the_generation_phase():
    with looping(log_interval=2) as loop:
        for second in range(1, 5):
            loop.start(MADE_NS + second * NS)
            loop.now_ns += NS // 10
            loop.recorder.generations.begin(is_phase=second > 2)
            loop.now_ns += NS // 2
            loop.recorder.generations.end(100 * second, 10)
            loop.end(MADE_NS + second * NS + 800_000_000)
        slots = loop.slots()

    first, second, last = cut_all(slots, steady(8), MADE_NS + 6 * NS, log_interval=2)

    assert (first.generated_tokens, first.generation_s, first.prompt_tokens) == (300, pytest.approx(1.0), 20)
    assert (second.generated_tokens, second.generation_s, second.prompt_tokens) == (700, pytest.approx(1.0), 20)
    assert (last.generated_tokens, last.generation_s) == (0, 0.0)
    assert (first.busy_s, second.busy_s) == (pytest.approx(1.6), pytest.approx(0.6)), "0.5 s of 0.8 are generation"
    assert "generation" not in first.phases_s
    assert second.phases_s["generation"] == pytest.approx(1.0)
    assert second.devices[0].phases["generation"].energy.joules == pytest.approx(100.0)  # 100 W for 1 s


@cases(
    ("own_times_ns", "first", "second"),
    [([100, 400, 200], (2, 500e-9), (1, 200e-9)), ([100, None, None, None], (1, 100e-9), (0, 0.0))],
)
def test_window_has_number_and_sum_of_own_times_of_iterations_with_a_sync_point(own_times_ns, first, second):
    with looping(log_interval=2) as loop:
        for i, own_ns in enumerate(own_times_ns):
            loop.start(2000 + 1000 * i)
            if own_ns:
                loop.now_ns = 2000 + 1000 * i + own_ns
                loop.recorder.sync_point(_now=loop.clock)
            loop.end(2900 + 1000 * i)
        rows = cut_all(loop.slots(), [], 10_000, log_interval=2)

    assert [(row.own_steps, row.own_step_s) for row in rows[:2]] == [pytest.approx(first), pytest.approx(second)]


@cases(
    ("reasons", "throttled_s"),
    [
        # A power cap is no slowdown.
        (
            [(), ("power_cap",), ("power_cap", "hw_thermal"), ("sync_boost",)],
            {"power_cap": 2.0, "hw_thermal": 1.0, "any": 1.0, "sync_boost": 1.0},
        ),
        # A single reading of a hardware slowdown is no throttling.
        (
            [(), ("hw_slowdown",), (), ("hw_slowdown", "hw_thermal"), ("hw_slowdown",), ("reliability",)],
            {"hw_thermal": 1.0, "any": 2.0, "hw_slowdown": 1.0, "reliability": 1.0},
        ),
    ],
)
def test_throttled_time_is_counted_by_reason(reasons, throttled_s):
    one = series(*[Sample(time_ns=at * NS, power_w=100.0, throttled_by=by) for at, by in enumerate(reasons, 1)])

    assert one.take_window(NS, len(reasons) * NS, {}).throttled_s == throttled_s


def test_clock_ratio_covers_only_iterations_with_a_busy_gpu():
    """Clocks of 2, 2, 1, 1 and 1 GHz at seconds 1 to 5, over a reference of 2 GHz; the GPU is idle until second 4."""
    series = Series(gpu(sm_clock_reference_hz=2e9), 5.0)
    for second, (clock_hz, busy) in enumerate([(2e9, 1.0), (2e9, 1.0), (1e9, 1.0), (1e9, 0.0), (1e9, 1.0)], 1):
        series.add_sample(Sample(time_ns=second * 10**9, utilization=busy, gauges={"sm_clock_hz": clock_hz}))

    whole = series.take_window(10**9, 5 * 10**9, {}).gauges[CLOCK_RATIO]
    phase = (15 * 10**8, 2 * 10**9)
    part = series.take_window(10**9, 5 * 10**9, {}, [phase, phase, (2 * 10**9, 3 * 10**9)]).gauges[CLOCK_RATIO]

    assert (whole.value_seconds, whole.covered_s) == pytest.approx((1.0 + 0.75 + 0.5, 3.0))
    assert (part.value_seconds, part.covered_s) == pytest.approx((0.5 + 0.5, 1.5))


def with_readings(readings):
    """Return a series with a reading of tensor activity and SM clock (GHz) at each second from 1 on."""
    series = Series(gpu(), 5.0)
    for second, (activity, clock_ghz) in enumerate(readings, 1):
        gauges = {"sm_clock_hz": clock_ghz * 1e9, "tensor_activity_ratio": activity}
        series.add_sample(Sample(time_ns=second * 10**9, utilization=1.0, gauges=gauges))
    return series


def test_tensor_clock_is_the_mean_of_products_over_whole_readings_in_iterations():
    series = with_readings([(0.0, 2.0), (0.8, 2.0), (0.4, 1.0), (0.0, 0.3), (0.8, 2.0), (0.8, 2.0), (0.8, 2.0)])
    evaluation = (35 * 10**8, 42 * 10**8)

    first = series.take_window(10**9, 55 * 10**8, {}, [evaluation]).gauges[TENSOR_CLOCK]
    rest = series.take_window(55 * 10**8, 7 * 10**9, {}).gauges[TENSOR_CLOCK]

    # The readings at seconds 4 and 5 overlap the evaluation; the reading at second 6 began in the first window.
    assert (first.value_seconds, first.covered_s) == pytest.approx((0.8 * 2e9 + 0.4 * 1.5e9, 2.0))
    assert (rest.value_seconds, rest.covered_s) == pytest.approx((2 * 0.8 * 2e9, 2.0))


def test_span_in_a_window_does_not_change_the_window():
    series, alone = (with_readings([(0.8, 2.0)] * 9) for _ in range(2))
    found = []
    for one in (series, alone):
        one.take_window(10**9, 2 * 10**9, {})
        if one is series:
            assert one.window_of_span(25 * 10**8, 7 * 10**9).gauges[TENSOR_CLOCK].covered_s > 0
        found.append(one.take_window(2 * 10**9, 9 * 10**9, {}, [(3 * 10**9, 4 * 10**9)]).gauges[TENSOR_CLOCK])

    assert found[0] == found[1]


def test_long_reading_is_no_sample_of_the_iterations():
    series = with_readings([(0.8, 2.0)])
    series.allow_gap(100.0)
    for second in (2, 32):
        gauges = {"sm_clock_hz": 2e9, "tensor_activity_ratio": 0.8}
        series.add_sample(Sample(time_ns=second * 10**9, utilization=1.0, gauges=gauges))

    assert series.take_window(10**9, 32 * 10**9, {}).gauges[TENSOR_CLOCK].covered_s == 1.0


def test_reading_that_began_before_the_first_window_has_no_tensor_clock():
    series = with_readings([(0.0, 2.0), (0.8, 2.0), (0.8, 2.0)])

    assert series.take_window(15 * 10**8, 3 * 10**9, {}).gauges[TENSOR_CLOCK].covered_s == 1.0


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_folded_readings_keep_their_tensor_clock_unless_they_are_of_an_evaluation(is_evaluation):
    series = with_readings([(0.5, 2.0)] * 100)
    series.compact((), 80 * 10**9)
    assert len(series.samples) < 60
    outside = [(20 * 10**9, 60 * 10**9)] if is_evaluation else []

    found = series.take_window(10**9, 100 * 10**9, {}, outside).gauges[TENSOR_CLOCK]

    assert found.value_seconds / found.covered_s == pytest.approx(1e9)
    assert found.covered_s == pytest.approx(99.0) if not is_evaluation else found.covered_s < 60


def test_device_without_a_reference_clock_has_no_clock_ratio():
    one = series(*[Sample(time_ns=second * NS, gauges={"sm_clock_hz": 1e9}) for second in (1, 2)])

    assert one.take_window(NS, 2 * NS, {}).gauges.keys() == {"sm_clock_hz"}


def test_power_above_the_last_bin_is_counted_in_the_last_bin():
    one = series(*[Sample(time_ns=at * NS, power_w=watts) for at, watts in enumerate((100.0, 3995.0, 9e3, 9e3), 1)])

    assert one.take_window(NS, 4 * NS, {}).power_histogram_s == {399: 3.0}
