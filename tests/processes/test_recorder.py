"""effllm/trainer/recorder.py: records of the training loop's calls; these calls never raise."""

import ast
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


def play(loop, calls):
    """Make calls of the loop: each has a time, a name and arguments, as in ``2000 start, 2100 phase_start other``."""
    generations = loop.recorder.generations
    methods = {"value": lambda number: loop.value("loss", number), "generate": generations.begin}
    methods |= {"generated": generations.end, "add_generation": generations.add_generation}
    for call in calls.split(", "):
        at_ns, name, *words = call.split()
        loop.now_ns = int(at_ns)
        now = {"_now": loop.clock} if name in ("start", "end", "sync_point", "end_rank_wait") else {}
        arguments = [word if word.isalpha() and word != "None" else ast.literal_eval(word) for word in words]
        (methods.get(name) or getattr(loop.recorder, name))(*arguments, **now)


TIMES = {
    "data wait is between two iterations": (
        "2000 start, 2900 end, 3000 start, 3500 end",
        [(2000, 900, 0, (0, 0, 0)), (3000, 1400, 100, (0, 0, 0))],
    ),
    "step and data wait exclude phases": (
        "2000 start, 2100 phase_start checkpoint, 2400 phase_end, 3000 end, 3100 phase_start evaluation, "
        "3900 phase_end, 4000 start, 4500 end",
        [(2000, 700, 0, (0, 300, 0)), (4000, 700 + 500, 200, (800, 300, 0))],
    ),
    "step excludes an evaluation that is reported later": (
        "2000 start, 2000 count_as_phase 2100 2400, 2000 add_data_wait 50, 3000 end, 3000 count_as_phase 3000 3100, "
        "3200 start, 3500 end",  # the second evaluation is reported without an open iteration
        [(2050, 650, 0, (300, 0, 0)), (3200, 650 + 300, 200, (300, 0, 0))],
    ),
    "nested phase is a part of the outer phase": (
        "2000 start, 2100 phase_start evaluation, 2200 phase_start checkpoint, 2300 phase_end, 2600 phase_end, "
        "3000 end",
        [(2000, 500, 0, (500, 0, 0))],
    ),
    "iterations in a phase are a part of the phase": (
        "2000 start, 2500 end, 2600 phase_start evaluation, 2700 start, 2900 end, 3000 phase_end, 3100 start, "
        "3400 end",  # data wait is from 2500 to 2600 and from 3000 to 3100
        [(3100, 500 + 300, 200, (400, 0, 0))],
    ),
    "unknown phase is other": (
        "2000 start, 2100 phase_start coffee, 2200 phase_end, 2300 phase_start None, 2400 phase_end, 3000 end",
        [(2000, 800, 0, (0, 0, 200))],
    ),
    "second start replaces the first": (
        "2000 start, 2100 end, 2200 start, 2500 start, 2600 end",
        [(2500, 200, 400, (0, 0, 0))],
    ),
    "phase is kept when its iteration starts again": (
        "2000 start, 2100 end, 2200 start, 2300 phase_start checkpoint, 2600 phase_end, 2700 start, 2800 end",
        [(2700, 200, 300, (0, 300, 0))],
    ),
}


@pytest.mark.parametrize(("calls", "expected"), TIMES.values(), ids=TIMES)
def test_every_time_of_a_loop_has_one_class(loop, calls, expected):
    play(loop, calls)

    found = [(slot.start_ns, slot.step_ns, slot.wait_ns, phases_ns(slot)) for slot in loop.iterations()]
    assert found[-len(expected) :] == expected


def test_iteration_that_is_put_aside_is_another_phase(loop):
    play(loop, "2000 start")
    loop.now_ns = 9000
    assert loop.recorder.count_as_other_phase(lambda: 9000)
    play(loop, "9000 start, 9500 end, 9500 start, 9600 phase_start evaluation, 9700 phase_end")
    assert not loop.recorder.count_as_other_phase(lambda: 9800), "an iteration with a phase stays one"
    loop.end(9900)

    first, second = loop.iterations()
    assert (first.step_ns, first.wait_ns, phases_ns(first)) == (500, 0, (0, 0, 7000))
    assert (second.step_ns, second.wait_ns, phases_ns(second)) == (500 + 300, 0, (100, 0, 7000))


def test_iteration_without_a_start_begins_at_the_previous_end(loop):
    play(loop, "1100 phase_start other, 1300 phase_end, 2000 end, 2600 end")

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
    play(loop, "2000 start, 2100 end 512 4, 2200 start, 2300 end 512 4 500 480")

    assert loop.iterations()[-1].counts[:4] == (1012, 1024, 480, 8)
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


class OnGpu:
    """A number whose reading would wait for the GPU."""

    is_cuda = True

    def _wait(self, *_):
        raise SystemExit("this would synchronize")

    __int__ = __lt__ = _wait


def test_number_on_a_gpu_is_not_read_but_warned_of(loop):
    loop.start(2000)
    loop.end(2100, OnGpu())
    assert counted(loop.iterations()[0]).tokens == 0
    assert len(loop.warnings) == 1


def test_generation_count_on_a_gpu_is_not_read_but_warned_of(loop):
    loop.recorder.generations.add_generation(OnGpu(), 5)
    loop.recorder.generations.begin()
    loop.recorder.generations.end(OnGpu())
    loop.end(3000)

    assert generated(loop.iterations()[0]) == (0, 0, 0)
    assert len([line for line in loop.warnings if "without a start" not in line]) == 1


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
            loop.recorder.record_loss(data.draw(ANYTHING), data.draw(ANYTHING))
        loop.recorder.reset()
        loop.recorder.finish(data.draw(ANYTHING))

        slots = loop.slots()
        assert [slot.ordinal for slot in slots if slot.kind == ring.ITERATION] == [1, 2, 3, 4]
        assert slots[-1].kind == ring.END
        assert len(loop.warnings) <= 4


def test_loss_is_recorded_with_the_last_and_the_given_iteration(loop):
    loop.end(2000)
    loop.recorder.record_loss(5001, 3.25)
    loop.recorder.record_loss(5001, None)

    first, second = loop.slots(ring.LOSS)
    assert (first.ordinal, first.number, first.value) == (1, 5001, 3.25)
    assert second.value != second.value, "a missing loss is NaN"


def test_decreasing_iteration_number_warns_once_and_is_kept(loop):
    for number in (10, 9, 8):
        loop.recorder.record_loss(number, 1.0)

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


def test_state_changes_with_the_calls_of_the_loop(loop):
    assert loop.reader.read_state() == (ring.STARTUP, 0, MADE_NS, 0)
    states = []
    for call in ("2000 start", "2000 phase_start checkpoint", "2000 phase_end", "2100 end", "2100 finish"):
        play(loop, call)
        states.append(loop.reader.read_state())

    assert [state[0] for state in states] == [ring.STEP, ring.PHASE_STATE, ring.STEP, ring.BETWEEN, ring.FINISHED]
    assert [state[1] for state in states] == [1, 0, 1, 1, 1]
    assert states[1][3] == 1, "checkpoint is the second of the marked phases"


def test_finish_ends_an_open_phase_and_writes_an_end_record(loop):
    play(loop, "2000 end, 2000 phase_start evaluation, 2000 phase_start checkpoint, 2500 finish failed")
    play(loop, "2500 finish completed, 3000 start, 3100 end, 3100 record_loss 1 1.0")

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
    recorder.start(); recorder.end(5, 1); recorder.record_loss(1, 1.0); recorder.phase_start("other")
    recorder.phase_end(); recorder.reset(); recorder.finish()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
reader = RingReader(writer.descriptor)
print([(slot.ordinal, slot.counts[0]) for slot in reader.read_new()], reader.read_state()[:2])
recorder.start(); recorder.end(5, 1)
print([(slot.ordinal, slot.counts[0]) for slot in reader.read_new()], reader.read_state()[:2])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[(1, 5)] (1, 1)\n[(2, 10)] (1, 2)\n"


def test_memory_does_not_grow_over_20000_iterations(loop):
    recorder = loop.recorder

    def iterate(times):
        for number in range(times):
            recorder.start()
            recorder.end(512, 4, -1)  # each iteration also has an invalid count
            recorder.record_loss(number, 1.0)

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


def test_every_record_contains_totals_of_generated_tokens_and_time(loop):
    play(loop, "2000 start, 2000 add_generation 120 300 40, 3000 end, 3000 add_generation 80 200, 3500 start, 4000 end")
    play(loop, "4000 add_generation 1 1, 4000 finish")

    first, second, end = (slot for slot in loop.slots() if slot.kind in (ring.ITERATION, ring.END))
    assert [generated(first), generated(second), generated(end)] == [(120, 300, 40), (200, 500, 40), (201, 501, 40)]
    assert counted(first).tokens == 0, "generated tokens are no training tokens"


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


GENERATIONS = {
    "phase": ("2000 start, 2100 generate True, 2700 generated 60 5, 3000 end", 400, 0, 600, (60, 600, 5)),
    "no phase": ("2000 start, 2100 generate, 2700 generated 60, 3000 end", 1000, 0, 0, (60, 600, 0)),
    "nested": (
        # A request: LLM.chat calls LLM.generate. Without counts of its own it has those of its parts, 30 + 12.
        "2000 generate, 2100 generate, 2200 generate, 2300 generated 30 4, 2400 generated 30 4, 2400 generate, "
        "2500 generated 12 1, 2600 generated, 3000 generate, 3100 generated 8, 4000 start, 4100 end",
        100,
        0,
        0,
        (50, 700, 5),
    ),
    "in an evaluation": (
        "2000 phase_start evaluation, 2100 generate True, 2300 generated 10, 2500 phase_end, 3000 start, 3100 end",
        100,
        500,
        0,
        (10, 200, 0),
    ),
}


@pytest.mark.parametrize(
    ("calls", "step_ns", "evaluation_ns", "generation_phase_ns", "expected"), GENERATIONS.values(), ids=GENERATIONS
)
def test_time_of_a_generation_is_in_the_step_or_in_its_phase(
    loop, calls, step_ns, evaluation_ns, generation_phase_ns, expected
):
    play(loop, calls)

    slot = loop.iterations()[0]
    assert (slot.step_ns, slot.wait_ns, generated(slot)) == (step_ns, 0, expected)
    assert (slot.phases_ns[0], slot.phases_ns[3]) == (evaluation_ns, generation_phase_ns)
    assert loop.warnings == []


def test_generation_phase_is_a_record_before_its_iteration(loop):
    play(loop, "2000 start, 2100 generate True, 2700 generated 60 5, 3000 end")

    assert [(slot.kind, slot.what, slot.start_ns, slot.end_ns) for slot in loop.slots()] == [
        (ring.PHASE, 3, 2100, 2700), (ring.ITERATION, 0, 2000, 3000)
    ]  # fmt: skip


def test_generation_end_without_start_warns_once(loop):
    play(loop, "1000 generated 5, 1000 generated 5, 2000 start, 3000 end")

    assert generated(loop.iterations()[0]) == (0, 0, 0)
    assert len(loop.warnings) == 1


SYNC_POINTS = {
    "without data wait and phases": (
        "2000 start, 2000 add_data_wait 100, 2300 phase_start other, 2500 phase_end, 3000 sync_point, 3600 end",
        [3000 - 2100 - 200],
    ),
    "only the first sync point of an iteration": (
        "2000 start, 2300 sync_point, 2500 sync_point, 2900 end, 3000 start, 3900 end, "
        "4000 start, 4300 sync_point, 4500 sync_point, 4900 end",
        [300, 0, 300],
    ),
    "also between two waits for other ranks": (
        "2000 start, 2300 sync_point, 2500 end_rank_wait, 2500 add_data_wait 20, 2550 phase_start other, "
        "2560 phase_end, 2600 sync_point, 2600 sync_point, 2700 end_rank_wait, 3000 end, "
        "4000 start, 4000 end_rank_wait, 4100 sync_point, 4900 end",  # end_rank_wait of the iteration before
        [300 + 100 - 20 - 10, 100],
    ),
    "not outside an iteration": (
        "1000 sync_point, 2000 start, 2100 phase_start evaluation, 2100 sync_point, 2100 phase_end, 2900 end, "
        "2950 sync_point, 2950 finish, 2950 sync_point",
        [0],
    ),
}


@pytest.mark.parametrize(("calls", "own_ns"), SYNC_POINTS.values(), ids=SYNC_POINTS)
def test_time_until_the_sync_point_is_own_time(loop, calls, own_ns):
    play(loop, calls)

    assert [slot.number for slot in loop.iterations()] == own_ns


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


EDGES = {
    "before a phase": ("2000 start, 2100 end, 2200 start, 2200 value 1.0, 2200 phase_start other", [(2, [1.0])]),
    "between iterations": ("1000 value 1.0, 2000 start, 2100 end, 2100 value 2.0", [(0, [1.0]), (1, [2.0])]),
    "iteration starts again": ("2000 start, 2000 value 1.0, 2100 start, 2200 end", [(1, [1.0])]),
    "end in it": ("2000 start, 2000 value 1.0, 2000 finish failed, 2000 value 2.0", [(1, [1.0])]),
}


@pytest.mark.parametrize(("calls", "expected"), EDGES.values(), ids=EDGES)
def test_values_are_written_at_the_next_edge(loop, calls, expected):
    play(loop, calls)

    assert values(loop.slots()) == expected


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
