"""effllm/trainer/recorder.py: records of the training loop's calls; these calls never raise."""

import subprocess
import sys
import threading
import tracemalloc
from itertools import pairwise

import pytest
from builders import MADE_NS, counted, looping
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from effllm.records import ring
from effllm.trainer import value_buffer


@pytest.fixture
def loop():
    with looping() as loop:
        yield loop


def phases_ns(slot):
    return slot.phases_ns[:3]


def test_step_time_and_data_wait_of_an_iteration_are_separate(loop):
    loop.start(2000)
    loop.end(2900)
    loop.start(3000)  # 100 of wait
    loop.end(3500)  # 500 of step

    first, second = loop.iterations()
    assert (first.start_ns, first.end_ns, first.step_ns, first.wait_ns) == (2000, 2900, 900, 0)
    assert (second.start_ns, second.end_ns, second.step_ns, second.wait_ns) == (3000, 3500, 1400, 100)


def test_data_wait_and_step_time_exclude_phases(loop):
    loop.start(2000)
    loop.phase("checkpoint", 2100, 2400)
    loop.end(3000)  # 1000 less 300
    loop.phase("evaluation", 3100, 3900)
    loop.start(4000)  # 1000 less 800
    loop.end(4500)

    slot = loop.iterations()[-1]
    assert (slot.step_ns, slot.wait_ns) == (700 + 500, 200)
    assert phases_ns(slot) == (800, 300, 0)


def test_step_time_excludes_an_evaluation_that_is_reported_later(loop):
    loop.start(2000)
    loop.recorder.evaluated(2100, 2400)
    loop.recorder.waited(50)
    loop.end(3000)  # 1000 less 300 and 50
    loop.recorder.evaluated(3000, 3100)  # there is no open iteration at this time
    loop.start(3200)
    loop.end(3500)

    first, second = loop.iterations()
    assert (first.step_ns, first.wait_ns, phases_ns(first)) == (650, 0, (300, 0, 0))
    assert (second.step_ns, second.wait_ns, phases_ns(second)) == (650 + 300, 200, (300, 0, 0))


def test_iteration_that_is_put_aside_is_another_phase(loop):
    loop.start(2000)
    loop.now_ns = 9000
    assert loop.recorder.put_aside(lambda: 9000)
    loop.start(9000)
    loop.end(9500)
    loop.start(9500)
    loop.phase("evaluation", 9600, 9700)
    assert not loop.recorder.put_aside(lambda: 9800), "an iteration with a phase stays one"
    loop.end(9900)

    first, second = loop.iterations()
    assert (first.step_ns, first.wait_ns, phases_ns(first)) == (500, 0, (0, 0, 7000))
    assert (second.step_ns, second.wait_ns, phases_ns(second)) == (500 + 300, 0, (100, 0, 7000))


def test_time_of_a_nested_phase_is_counted_in_the_outer_phase(loop):
    loop.start(2000)
    loop.now_ns = 2100
    loop.recorder.phase_start("evaluation")
    loop.phase("checkpoint", 2200, 2300)
    loop.now_ns = 2600
    loop.recorder.phase_end()
    loop.end(3000)

    assert phases_ns(loop.iterations()[0]) == (500, 0, 0)


def test_time_of_iterations_in_a_phase_is_counted_in_the_phase(loop):
    loop.start(2000)
    loop.end(2500)
    loop.now_ns = 2600
    loop.recorder.phase_start("evaluation")
    loop.start(2700)
    loop.end(2900)
    loop.now_ns = 3000
    loop.recorder.phase_end()
    loop.start(3100)
    loop.end(3400)

    slot = loop.iterations()[-1]
    # Data wait is from 2500 to 2600 and from 3000 to 3100; the step is from 2000 to 2500 and from 3100 to 3400.
    assert (slot.step_ns, slot.wait_ns, phases_ns(slot)) == (800, 200, (400, 0, 0))


def test_unknown_phase_is_recorded_as_other(loop):
    loop.start(2000)
    loop.phase("coffee", 2100, 2200)
    loop.phase(None, 2300, 2400)
    loop.end(3000)

    assert phases_ns(loop.iterations()[0]) == (0, 0, 200)


def test_second_start_of_an_iteration_replaces_the_first_start(loop):
    loop.start(2000)
    loop.end(2100)
    loop.start(2200)
    loop.start(2500)  # the time between the two starts is not part of a step
    loop.end(2600)

    slot = loop.iterations()[-1]
    assert (slot.start_ns, slot.step_ns, slot.wait_ns) == (2500, 200, 400)


def test_phase_is_kept_when_its_iteration_starts_again(loop):
    loop.start(2000)
    loop.end(2100)
    loop.start(2200)
    loop.phase("checkpoint", 2300, 2600)
    loop.start(2700)
    loop.end(2800)

    slot = loop.iterations()[-1]
    assert (slot.step_ns, slot.wait_ns, phases_ns(slot)) == (200, 300, (0, 300, 0))


def test_iteration_without_a_start_begins_at_the_previous_end(loop):
    loop.phase("other", 1100, 1300)
    loop.end(2000)  # from 1000, less 200
    loop.end(2600)

    first, second = loop.iterations()
    assert (first.step_ns, second.step_ns, second.wait_ns) == (800, 1400, 0)
    assert len(loop.warnings) == 1
    assert "without a start" in loop.warnings[0]


COMMANDS = st.tuples(st.integers(0, 5), st.sampled_from(["start", "end", "evaluation", "checkpoint", "phase_end"]))


@given(st.lists(COMMANDS, max_size=60))
def test_every_nanosecond_is_assigned_to_exactly_one_class(commands):
    # The test computes the classes itself.  It adds up time until an iteration ends.  Only then the class of this time
    # is known: wait, step or start-up.
    phases, between, inside, step, wait, startup = {}, 0, 0, 0, 0, 0
    started = ended = False
    open_phases = []
    with looping() as loop:
        for advance, command in commands:
            loop.now_ns += advance
            if open_phases:
                phases[open_phases[0]] = phases.get(open_phases[0], 0) + advance
            elif started:
                inside += advance
            else:
                between += advance
            if command == "start":
                between, inside, started = between + inside, 0, True
                loop.start(loop.now_ns)
            elif command == "end":
                if not started:
                    step += between
                else:
                    step += inside
                    wait, startup = (wait + between, startup) if ended else (wait, startup + between)
                between, inside, started, ended = 0, 0, False, True
                loop.end(loop.now_ns)
            elif command == "phase_end":
                open_phases = open_phases[:-1]
                loop.recorder.phase_end()
            else:
                open_phases.append(command)
                loop.recorder.phase_start(command)

            for slot in loop.iterations():
                expected = (phases.get("evaluation", 0), phases.get("checkpoint", 0), 0)
                assert (slot.step_ns, slot.wait_ns, phases_ns(slot)) == (step, wait, expected)
                assert step + wait + sum(expected) + startup == loop.now_ns - MADE_NS


@given(st.lists(COMMANDS, max_size=60))
def test_phase_records_do_not_overlap_and_their_sum_is_the_total(commands):
    with looping() as loop:
        for advance, command in commands:
            loop.now_ns += advance
            if command in ("start", "end"):
                getattr(loop, command)(loop.now_ns)
            elif command == "phase_end":
                loop.recorder.phase_end()
            else:
                loop.recorder.phase_start(command)
        loop.recorder.finish()

        slots = loop.slots()
        marked = [slot for slot in slots if slot.kind == ring.PHASE]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(marked))
        for what, total_ns in enumerate(phases_ns(slots[-1])):
            assert sum(slot.end_ns - slot.start_ns for slot in marked if slot.what == what) == total_ns


def test_counts_are_added_and_processed_tokens_are_real_by_default(loop):
    loop.start(2000)
    loop.end(2100, 512, 4)
    loop.start(2200)
    loop.end(2300, 512, 4, 500, 480)

    slot = loop.iterations()[-1]
    assert slot.counts[:4] == (1012, 1024, 480, 8)
    assert loop.warnings == []


@cases("bad", [-1, float("nan"), float("inf"), "512", b"5", 2**62, 10**400, [1], object()])
@cases("place", range(4))
def test_invalid_count_is_ignored_with_one_warning(bad, place):
    counts = [7, 7, 7, 7]
    counts[place] = bad
    with looping() as loop:
        for at_ns in (2000, 3000):
            loop.start(at_ns)
            loop.end(at_ns + 100, *counts)
        loop.start(4000)
        loop.end(4100, 5, 5, 5, 5)
        slot = loop.iterations()[-1]

    # If one of the four counts is invalid, all four are ignored.
    assert (slot.ordinal, slot.counts[:4]) == (3, (5, 5, 5, 5))
    assert len(loop.warnings) == 1
    assert "iteration 1 has no counts" in loop.warnings[0]


def test_totals_never_exceed_the_number_range_of_a_record(loop):
    for ordinal in range(1, 6):
        loop.end(MADE_NS + ordinal, 2**60)

    # With the fourth count the total would be 2**62, so only three counts are added.
    assert counted(loop.iterations()[-1]).tokens == 3 * 2**60


def test_counts_of_other_number_types_are_accepted(loop):
    class Scalar:  # a number like the scalars of NumPy and torch
        def __int__(self):
            return 7

    loop.end(2000, Scalar(), 3.0, tokens=True)

    slot = loop.iterations()[0]
    assert slot.counts[:4] == (1, 7, 0, 3)


def test_count_on_a_gpu_is_not_read_because_a_read_would_wait(loop):
    reads = []

    class OnGpu:
        is_cuda = True

        def __int__(self):
            reads.append("int")
            return 7

        def __lt__(self, other):
            reads.append("<")
            return False

    loop.start(2000)
    loop.end(2100, OnGpu())

    assert reads == []
    assert counted(loop.iterations()[0]).tokens == 0
    assert len(loop.warnings) == 1


class Hostile:
    """A value that raises an exception in every operation."""

    def _raise(self, *_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    __int__ = __float__ = __index__ = __bool__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __str__ = _raise
    __hash__ = object.__hash__

    @property
    def is_cuda(self):
        raise RuntimeError


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.builds(Hostile),
)


@given(st.data())
def test_calls_with_any_arguments_never_raise_an_exception(data):
    with looping(log_interval=2) as loop:
        for at_ns in range(2000, 2008, 2):
            loop.start(at_ns)
            loop.recorder.phase_start(data.draw(ANYTHING))
            loop.recorder.phase_end()
            loop.end(at_ns + 1, *data.draw(st.lists(ANYTHING, max_size=4)))
            loop.recorder.loss(data.draw(ANYTHING), data.draw(ANYTHING))
        loop.recorder.reset()
        loop.recorder.finish(data.draw(ANYTHING))

        slots = loop.slots()
        assert [slot.ordinal for slot in slots if slot.kind == ring.ITERATION] == [1, 2, 3, 4]
        assert slots[-1].kind == ring.END
        assert len(loop.warnings) <= 4


def test_loss_is_recorded_with_the_last_and_the_given_iteration(loop):
    loop.end(2000)
    loop.recorder.loss(5001, 3.25)
    loop.recorder.loss(5001, None)

    first, second = loop.slots(ring.LOSS)
    assert (first.ordinal, first.number, first.value) == (1, 5001, 3.25)
    assert second.value != second.value, "a missing loss is NaN"


def test_decreasing_iteration_number_warns_once_and_is_kept(loop):
    for number in (10, 9, 8):
        loop.recorder.loss(number, 1.0)

    assert [slot.number for slot in loop.slots(ring.LOSS)] == [10, 9, 8]
    assert len(loop.warnings) == 1
    assert "decreased from 10 to 9" in loop.warnings[0]


def test_agent_is_woken_at_a_window_end_and_in_the_next_iteration():
    with looping(log_interval=3, offset=1) as loop:
        woken = []
        for at_ns in range(2000, 2500, 100):
            loop.start(at_ns)
            loop.end(at_ns + 50)
            woken.append(loop.wakes)

    # The iterations have the numbers 2 to 6. Windows end after the numbers 3 and 6: the second and the fifth iteration.
    assert woken == [0, 1, 2, 2, 3]


def test_new_recorder_is_in_the_state_startup():
    with looping() as loop:
        assert loop.reader.state() == (ring.STARTUP, 0, MADE_NS, 0)


def test_state_changes_with_the_calls_of_the_loop(loop):
    states = []
    loop.start(2000)
    states.append(loop.reader.state())
    loop.recorder.phase_start("checkpoint")
    states.append(loop.reader.state())
    loop.recorder.phase_end()
    states.append(loop.reader.state())
    loop.end(2100)
    states.append(loop.reader.state())
    loop.recorder.finish()
    states.append(loop.reader.state())

    assert [state[0] for state in states] == [ring.STEP, ring.PHASE_STATE, ring.STEP, ring.BETWEEN, ring.FINISHED]
    assert [state[1] for state in states] == [1, 0, 1, 1, 1]
    assert states[1][3] == 1, "checkpoint is the second of the marked phases"


def test_finish_ends_an_open_phase_and_writes_an_end_record(loop):
    loop.end(2000)
    loop.recorder.phase_start("evaluation")
    loop.recorder.phase_start("checkpoint")
    loop.now_ns = 2500
    loop.recorder.finish("failed")
    loop.recorder.finish("completed")
    loop.start(3000)
    loop.end(3100)
    loop.recorder.loss(1, 1.0)

    slots = loop.slots()
    assert [slot.kind for slot in slots] == [ring.ITERATION, ring.PHASE, ring.END]
    assert (slots[-1].what, slots[-1].phases_ns[0]) == (1, 500)


def test_phase_end_without_start_warns_once_and_is_ignored(loop):
    loop.recorder.phase_end()
    loop.recorder.phase_end()

    assert loop.slots() == []
    assert len(loop.warnings) == 1


def test_forked_child_records_nothing_and_the_parent_continues():
    # The fork is in a new process, because the test process can have threads. Since Python 3.12, a fork of a process
    # with threads logs a warning.
    program = """
import os
from effllm.trainer.recorder import Recorder
from effllm.records.ring import RingReader, RingWriter

writer = RingWriter(16)
recorder = Recorder(writer, 1)
recorder.start(); recorder.end(5, 1)
child = os.fork()
if child == 0:
    recorder.start(); recorder.end(5, 1); recorder.loss(1, 1.0); recorder.phase_start("other"); recorder.phase_end()
    recorder.reset(); recorder.finish()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
reader = RingReader(writer.descriptor)
print([(slot.ordinal, slot.counts[0]) for slot in reader.read()], reader.state()[:2])
recorder.start(); recorder.end(5, 1)
print([(slot.ordinal, slot.counts[0]) for slot in reader.read()], reader.state()[:2])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[(1, 5)] (1, 1)\n[(2, 10)] (1, 2)\n"


def test_memory_does_not_grow_over_20000_iterations(loop):
    recorder = loop.recorder

    def iterate(times):
        for number in range(times):
            recorder.start()
            recorder.end(512, 4, -1)  # each iteration also has an invalid count
            recorder.loss(number, 1.0)

    iterate(1000)
    tracemalloc.start()
    try:
        iterate(100)
        before, _ = tracemalloc.get_traced_memory()
        iterate(20_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert after - before < 2000


def test_recorder_starts_no_thread(loop):
    before = threading.active_count()

    for at_ns in range(2000, 4000, 100):
        loop.start(at_ns)
        loop.end(at_ns + 50, 1, 1)

    assert threading.active_count() == before


def generated(slot):
    return counted(slot).generated_tokens, slot.generation_ns, counted(slot).prompt_tokens


def generate(loop, from_ns, to_ns, *counts, is_phase=False):
    loop.now_ns = from_ns
    loop.recorder.generations.start(is_phase)
    loop.now_ns = to_ns
    loop.recorder.generations.end(*counts)


def test_every_record_contains_totals_of_generated_tokens_and_time(loop):
    loop.start(2000)
    loop.recorder.generations.add_generation(120, 300, 40)
    loop.end(3000)
    loop.recorder.generations.add_generation(80, 200)
    loop.start(3500)
    loop.end(4000)
    loop.recorder.generations.add_generation(1, 1)
    loop.recorder.finish()

    first, second, end = (slot for slot in loop.slots() if slot.kind in (ring.ITERATION, ring.END))
    assert [generated(first), generated(second), generated(end)] == [(120, 300, 40), (200, 500, 40), (201, 501, 40)]
    assert (first.step_ns, counted(first).tokens) == (1000, 0), (
        "generation time is part of the step, and generated tokens are no training tokens"
    )


@cases("bad", [-1, float("nan"), float("inf"), "512", 2**62, 10**400, [1], None, object()])
@cases("place", range(3))
def test_invalid_generation_count_is_ignored_with_one_warning(bad, place):
    counts = [7, 8, 9]
    counts[place] = bad
    with looping() as loop:
        loop.recorder.generations.add_generation(*counts)
        loop.recorder.generations.add_generation(*counts)
        loop.recorder.generations.add_generation(7, 8, 9)
        loop.start(2000)
        loop.end(3000)
        slot = loop.iterations()[0]

    assert generated(slot) == (7, 8, 9)
    assert len(loop.warnings) == 1


def test_gpu_tensor_is_not_read_for_the_count_of_a_generation(loop):
    class OnGpu:
        is_cuda = True

        def __int__(self):
            raise AssertionError("this would synchronize")

    loop.recorder.generations.add_generation(OnGpu(), 5)
    generate(loop, 1100, 1200, OnGpu())
    loop.start(2000)
    loop.end(3000)

    assert generated(loop.iterations()[0]) == (0, 0, 0)
    assert len(loop.warnings) == 1


def test_step_time_and_data_wait_exclude_a_generation_phase(loop):
    loop.start(2000)
    generate(loop, 2100, 2700, 60, 5, is_phase=True)
    loop.end(3000)  # 1000 less 600

    slots = loop.slots()
    assert [(s.kind, s.what, s.start_ns, s.end_ns) for s in slots] == [
        (ring.PHASE, 3, 2100, 2700), (ring.ITERATION, 0, 2000, 3000)
    ]  # fmt: skip
    assert (slots[1].step_ns, slots[1].wait_ns, slots[1].phases_ns[3]) == (400, 0, 600)
    assert generated(slots[1]) == (60, 600, 5)


def test_step_time_includes_a_generation_without_a_phase(loop):
    loop.start(2000)
    generate(loop, 2100, 2700, 60)
    loop.end(3000)

    slot = loop.iterations()[0]
    assert (slot.step_ns, slot.phases_ns[3], generated(slot)) == (1000, 0, (60, 600, 0))


def test_nested_generation_is_counted_once(loop):
    recorder = loop.recorder
    loop.now_ns = 2000
    recorder.generations.start()  # a request: LLM.chat calls LLM.generate
    loop.now_ns = 2100
    recorder.generations.start()
    generate(loop, 2200, 2300, 30, 4)
    loop.now_ns = 2400
    recorder.generations.end(30, 4)
    generate(loop, 2400, 2500, 12, 1)
    loop.now_ns = 2600
    recorder.generations.end()  # no counts are given, so the counts of the inner generations are used: 30 + 12
    generate(loop, 3000, 3100, 8)
    loop.start(4000)
    loop.end(4100)

    assert generated(loop.iterations()[0]) == (50, 700, 5)
    assert loop.warnings == []


def test_generation_end_without_start_warns_once(loop):
    loop.recorder.generations.end(5)
    loop.recorder.generations.end(5)
    loop.start(2000)
    loop.end(3000)

    assert generated(loop.iterations()[0]) == (0, 0, 0)
    assert len(loop.warnings) == 1


def test_time_of_a_generation_in_an_evaluation_counts_as_evaluation(loop):
    loop.now_ns = 2000
    loop.recorder.phase_start("evaluation")
    generate(loop, 2100, 2300, 10, is_phase=True)
    loop.now_ns = 2500
    loop.recorder.phase_end()
    loop.start(3000)
    loop.end(3100)

    slot = loop.iterations()[0]
    assert (slot.phases_ns[0], slot.phases_ns[3], generated(slot)) == (500, 0, (10, 200, 0))


def test_time_until_the_sync_point_excludes_data_wait_and_phases(loop):
    loop.start(2000)
    loop.recorder.waited(100)  # data wait: the step begins 100 ns later
    loop.phase("other", 2300, 2500)
    loop.now_ns = 3000
    loop.recorder.sync_point(_now=loop.clock)
    loop.end(3600)

    (only,) = loop.iterations()
    assert only.number == 700  # 2100 to 3000, less 200


def test_only_the_first_sync_point_of_an_iteration_is_used(loop):
    for start_ns in (2000, 3000, 4000):
        loop.start(start_ns)
        for after_ns in (300, 500) if start_ns != 3000 else ():
            loop.now_ns = start_ns + after_ns
            loop.recorder.sync_point(_now=loop.clock)
        loop.end(start_ns + 900)

    assert [slot.number for slot in loop.iterations()] == [300, 0, 300]


def test_time_between_two_waits_for_other_ranks_is_own_time(loop):
    loop.start(2000)
    loop.now_ns = 2300
    loop.recorder.sync_point(_now=loop.clock)
    loop.now_ns = 2500
    loop.recorder.work_again(_now=loop.clock)
    loop.recorder.waited(20)  # for data of the next micro-batch
    loop.phase("other", 2550, 2560)
    loop.now_ns = 2600
    loop.recorder.sync_point(_now=loop.clock)
    loop.recorder.sync_point(_now=loop.clock)  # still in the wait
    loop.now_ns = 2700
    loop.recorder.work_again(_now=loop.clock)
    loop.end(3000)
    loop.start(4000)
    loop.recorder.work_again(_now=loop.clock)  # of the iteration before
    loop.now_ns = 4100
    loop.recorder.sync_point(_now=loop.clock)
    loop.end(4900)

    assert [slot.number for slot in loop.iterations()] == [300 + 100 - 20 - 10, 100]


def test_sync_point_outside_an_iteration_is_ignored(loop):
    loop.recorder.sync_point(_now=loop.clock)
    loop.start(2000)
    loop.now_ns = 2100
    loop.recorder.phase_start("evaluation")
    loop.recorder.sync_point(_now=loop.clock)
    loop.recorder.phase_end()
    loop.end(2900)
    loop.now_ns = 2950
    loop.recorder.sync_point(_now=loop.clock)
    loop.recorder.finish()
    loop.recorder.sync_point(_now=loop.clock)

    assert [slot.number for slot in loop.iterations()] == [0]


# --- values of instruments ---


def values(slots):
    return [(slot.ordinal, [value for _, value in slot.values]) for slot in slots if slot.kind == ring.VALUES]


def test_values_of_an_iteration_are_written_together_before_it_ends(loop):
    loop.start(2000)
    for number in range(ring.MAX_VALUES + 2):
        loop.value("loss", float(number))
    assert values(loop.slots()) == []
    loop.end(2100)

    slots = loop.slots()
    assert values(slots) == [(1, [float(number) for number in range(12)]), (1, [12.0, 13.0])]
    assert [slot.kind for slot in slots] == [ring.VALUES, ring.VALUES, ring.ITERATION], "the end may end a window"
    assert [(slot.number, {index for index, _ in slot.values}) for slot in slots[:2]] == [(12, {0}), (14, {0})]


def test_120_values_of_a_running_iteration_are_written_in_the_iteration(loop):
    loop.start(2000)
    for number in range(value_buffer.MAX_TOGETHER):
        loop.value("loss", float(number))

    assert [len(written) for _, written in values(loop.slots())] == [12] * 10


def test_values_of_short_iterations_are_written_every_100_ms_and_at_the_end_of_a_window():
    short_ns, long_ns = 30_000_000, 150_000_000
    with looping(log_interval=7) as loop:
        at_ns = 2000
        for iteration, length_ns in enumerate([*[short_ns] * 9, long_ns, long_ns], 1):
            loop.start(at_ns)
            loop.value("loss", float(iteration))
            at_ns += length_ns
            loop.end(at_ns)

        # An end follows the last write after 30, 60, 90 and 120 ms; iteration 7 ends a window.
        assert values(loop.slots()) == [
            (1, [1.0]), (5, [2.0, 3.0, 4.0, 5.0]), (7, [6.0, 7.0]), (10, [8.0, 9.0, 10.0]), (11, [11.0]),
        ]  # fmt: skip


def test_values_are_written_before_a_phase(loop):
    loop.start(2000)
    loop.end(2100)
    loop.start(2200)
    loop.value("loss", 1.0)
    loop.recorder.phase_start("evaluation")

    assert values(loop.slots()) == [(2, [1.0])]


def test_values_of_a_loop_in_another_thread_are_written(loop):
    def iterate():
        loop.start(2000)
        loop.value("loss", 1.0)
        loop.end(2100)

    other = threading.Thread(target=iterate)
    other.start()
    other.join()
    assert values(loop.slots()) == [(1, [1.0])]
    loop.recorder.finish()


def test_value_between_iterations_is_written_at_once(loop):
    loop.value("metric 0", 1.0)
    loop.start(2000)
    loop.end(2100)
    loop.value("metric 0", 2.0)

    assert values(loop.slots()) == [(0, [1.0]), (1, [2.0])]


def test_values_are_written_when_an_iteration_starts_again(loop):
    loop.start(2000)
    loop.value("metric 0", 1.0)
    loop.start(2100)
    loop.end(2200)

    slots = loop.slots()
    assert values(slots) == [(1, [1.0])]
    assert slots[-1].start_ns == 2100


def test_values_are_written_when_the_loop_ends_in_an_iteration(loop):
    loop.start(2000)
    loop.value("metric 0", 1.0)
    loop.recorder.finish("failed")
    loop.value("metric 0", 2.0)

    assert values(loop.slots()) == [(1, [1.0])]


def test_values_do_not_change_the_times_of_iterations(loop):
    for at_ns in (2000, 3000):
        loop.start(at_ns)
        loop.value("metric 0", 1.0)
        loop.end(at_ns + 600)

    assert [(slot.step_ns, slot.wait_ns) for slot in loop.iterations()] == [(600, 0), (1200, 400)]


def test_agent_is_woken_before_values_fill_the_ring():
    with looping() as loop:
        for _ in range(250):
            loop.value("metric 0", 1.0)

        assert loop.wakes == 1


def test_values_of_a_second_thread_raise_no_exception():
    with looping() as loop:
        errors, is_over = [], threading.Event()

        def record():
            try:
                while not is_over.is_set():
                    loop.value("metric 1", 2.0)
            except Exception as error:  # noqa: BLE001 - the test asserts that there is no error
                errors.append(error)

        other = threading.Thread(target=record)
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        other.start()
        try:
            for _ in range(3000):
                loop.recorder.start()
                for number in range(5):
                    loop.value("metric 0", float(number))
                loop.recorder.end(1, 1)
        finally:
            is_over.set()
            other.join()
            sys.setswitchinterval(interval_s)
        loop.recorder.finish()

        assert errors == []
        assert [slot.kind for slot in loop.slots()][-1] == ring.END, loop.reader.overrun


def test_values_of_a_second_thread_are_written_at_the_next_edge(loop):
    loop.start(2000)
    for number in range(value_buffer.MAX_TOGETHER + 2):
        other = threading.Thread(target=loop.value, args=("metric 0", float(number)))
        other.start()
        other.join()
    assert values(loop.slots()) == [], "two threads would write into the same slot"
    loop.end(2100)

    written = values(loop.slots())
    assert [number for _, part in written for number in part] == [float(number) for number in range(122)]
    assert {ordinal for ordinal, _ in written} == {1}


def test_values_of_a_second_thread_are_bounded_and_the_rest_is_counted(loop):
    def record():
        for number in range(value_buffer.MAX_PENDING + 5):
            loop.value("metric 0", float(number))

    loop.start(2000)
    other = threading.Thread(target=record)
    other.start()
    other.join()
    assert len(loop.values._pending) == value_buffer.MAX_PENDING
    loop.end(2100)

    last = loop.slots(ring.VALUES)[-1]
    assert last.number == value_buffer.MAX_PENDING + 5, "the agent reports five missing values"


def test_no_value_of_the_loop_is_lost_or_doubled_beside_a_second_thread():
    with looping(slots=4096) as loop:
        is_over = threading.Event()
        other = threading.Thread(target=lambda: [loop.value("other", float(n)) for n in range(900)] and is_over.set())
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        other.start()
        number = 0
        try:
            while not is_over.is_set() or number < 5000:
                loop.recorder.start()
                for _ in range(5):
                    loop.value("loop", float(number))
                    number += 1
                loop.recorder.end(1, 1)
        finally:
            other.join()
            sys.setswitchinterval(interval_s)
        loop.recorder.finish()
        found = {name: [] for name in loop.names}
        for slot in loop.slots(ring.VALUES):
            for index, value in slot.values:
                found[loop.names[index]].append(value)

    assert found == {"loop": [float(n) for n in range(number)], "other": [float(n) for n in range(900)]}


def test_value_that_is_not_a_float_is_ignored_with_one_warning(loop):
    for value in ("0.5", 3, None):
        loop.value("loss", value)
    loop.value("loss", 1.0)

    assert values(loop.slots()) == [(0, [1.0])]
    assert loop.warnings[:1] == ["value loss must be a float, not str; the value is ignored"]


def test_buffer_writes_as_many_values_at_once_as_a_record_has_room_for():
    assert value_buffer.MAX_VALUES == ring.MAX_VALUES


def test_value_is_ignored_before_and_after_a_recorder():
    unused = value_buffer.ValueBuffer()
    unused.add_value("loss", 1.0)
    with looping() as loop:
        loop.recorder.finish()
        loop.value("loss", 1.0)

        assert (unused._pending, loop.values._pending) == ([], [])


def test_end_of_an_old_recorder_keeps_the_values_of_a_new_recorder():
    with looping() as old, looping() as new:
        old.recorder._values = new.values  # all recorders of a process have the same pending values
        new.start(2000)
        new.value("loss", 1.0)
        old.recorder.disable()
        new.end(2100)

        assert values(new.slots()) == [(1, [1.0])]
