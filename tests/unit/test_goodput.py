"""effllm/job/goodput*.py: classes of elapsed time; the classes always add up to the elapsed time."""

from itertools import pairwise

import pytest
from builders import Job, amount, device_window, full, gpu, hello, row
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from effllm.config.settings import Config
from effllm.job.account import Rows
from effllm.job.aggregator import Aggregator
from effllm.job.goodput import PRODUCTIVE, Goodput
from effllm.job.goodput_attempt import CLASSES, MAX_SPANS
from effllm.job.goodput_tiles import MAX_BEFORE_S, RankTimes
from effllm.records.clock import Now
from effllm.records.rank import Integrals
from effllm.records.wire import Bye, Heartbeat
from effllm.views.text.summary import summary_text


class Run(Job):
    """A job with windows of 10 s, whose attempts and aggregators are replaced; its clocks may differ."""

    def __init__(self, world_size=2):
        self.world_size, self.attempt, self.boot = world_size, 1, "boot"
        self.now_s = self.time_s = 1000.0
        self.aggregator = Aggregator(Config(), "job-1", 1, self.time_s, None, self.boot)

    @property
    def now(self):
        return Now(self.now_s, self.time_s)

    @property
    def name(self):
        return f"job-{self.attempt}"

    def wait(self, seconds):
        self.now_s += seconds
        self.time_s += seconds
        return self

    def agent(self, rank):
        return f"agent-{rank}-{self.attempt}"

    def join(self, *ranks, offset=0, is_numbered=True, **changes):
        self.offset = offset
        for rank in ranks or range(self.world_size):
            super().join(rank, agent=self.agent(rank), offset=offset, is_numbered=is_numbered, **changes)
        return self

    def send(self, rank, window, **changes):
        shown = {"iteration_shown": changes.get("iteration_last", 10 * window) + self.offset}
        super().send(row(rank, window, **{"agent": self.agent(rank), **shown, **changes}))

    def window(self, number, *ranks, **changes):
        """Advance the clock by 10 s; the ranks report this window."""
        self.wait(10)
        for rank in ranks or range(self.world_size):
            self.send(rank, number, **changes)
        return self

    def bye(self, *ranks, status="killed", **changes):
        for rank in ranks or range(self.world_size):
            self.aggregator.bye(Bye(self.agent(rank), rank, status, 10, **changes), self.now)
        return self

    def restore(self):
        """Replace the aggregator, as after SIGKILL."""
        return self.continue_with(self.ledger())

    def restart(self, world_size=None):
        self.attempt += 1
        self.world_size = world_size or self.world_size
        return self.continue_with(self.next_ledger(self.name))

    def continue_with(self, ledger):
        self.aggregator = Aggregator(Config(), self.name, ledger.attempt, self.time_s, ledger, self.boot)
        return self

    def goodput(self, ended=True):
        return self.summary(ended).goodput

    def seconds(self, ended=True):
        return {name: seconds for name, seconds in self.goodput(ended).seconds.items() if abs(seconds) > 1e-9}


def adds_up(goodput):
    assert set(goodput.seconds) == set(goodput.joules) == set(CLASSES)
    assert min(goodput.seconds.values()) >= 0.0
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.elapsed_s, rel=1e-6, abs=1e-6)
    ranks = sum(one.elapsed_s * one.world_size for one in goodput.attempts)
    gaps = zip(goodput.attempts, goodput.attempts[1:], strict=False)
    ranks += sum(after.gap_before_s * before.world_size for before, after in gaps)
    assert sum(goodput.rank_seconds.values()) == pytest.approx(ranks, rel=1e-6, abs=1e-6)
    return True


@given(st.lists(st.floats(0.001, 30.0), min_size=1, max_size=8))
def test_rounding_errors_are_in_no_badput_class(lengths_s):
    run = Run().wait(0.1).join()
    for number, seconds in enumerate(lengths_s, 1):
        run.wait(seconds)
        for rank in range(2):
            run.send(rank, number, busy_s=0.9 * seconds, wait_s=0.1 * seconds)
    goodput = run.bye().goodput()

    assert all(seconds == 0 or seconds > 1e-9 * goodput.elapsed_s for seconds in goodput.seconds.values())


def test_time_below_a_microsecond_is_in_no_badput_class():
    run = Run().join().wait(10 + 3e-7)  # unix times in seconds are multiples of 0.24 µs
    for rank in range(2):
        run.send(rank, 1, busy_s=9.0, wait_s=1.0)

    goodput = run.bye(status="completed").goodput()
    assert {name for name, seconds in goodput.seconds.items() if seconds} == {"kept", "data"}


def test_healthy_job_has_only_kept_time_and_data_wait():
    goodput = Run().join().window(1).window(2).bye(status="completed").goodput()

    assert goodput.elapsed_s == 20.0
    assert (goodput.seconds["kept"], goodput.seconds["data"], goodput.ratio) == (18.0, 2.0, 0.9)
    assert goodput.rank_seconds["kept"] == 36.0
    # Two GPUs of 100 W.
    assert (goodput.joules["kept"], goodput.joules["data"]) == pytest.approx((3600.0, 400.0))
    assert (goodput.attempts[0].status, goodput.attempts[0].first, goodput.attempts[0].last) == ("completed", 1, 20)
    assert adds_up(goodput)


def test_phases_are_classes_with_their_own_joules():
    run = Run(1).join().wait(17).bye()
    parts = {"evaluation": full(5.0, 40.0), "startup": full(2.0, 10.0)}
    device = device_window("GPU-0", wall=full(17.0, 70.0), phases=parts)
    run.send(0, 1, phases_s={"evaluation": 5.0, "startup": 2.0}, devices=(device,))
    goodput = run.goodput()

    assert (goodput.seconds["evaluation"], goodput.seconds["startup"]) == (5.0, 2.0)
    assert (goodput.joules["evaluation"], goodput.joules["startup"]) == (200.0, 20.0)
    # The iterations: 17 * 70 - 5 * 40 - 2 * 10.
    assert goodput.joules["kept"] + goodput.joules["data"] == pytest.approx(970.0)


def test_generation_is_productive_and_a_separate_class():
    goodput = Run(1).join().wait(10).window(1, phases_s={"generation": 10.0}).goodput()

    assert goodput.seconds["generation"] == 10.0
    assert goodput.ratio == pytest.approx(19.0 / 20.0)
    assert PRODUCTIVE == ("kept", "generation")


def test_first_execution_of_repeated_iterations_counts_as_redone():
    run = Run().join().window(1).window(2).window(3).bye()
    goodput = run.wait(5).restart().join(offset=10).window(1).bye(status="completed").goodput()

    # Iterations 11 to 30 of the first attempt were lost, although only 11 to 20 were repeated so far.
    assert goodput.redone_iterations == 20
    assert (goodput.seconds["redone"], goodput.seconds["kept"]) == pytest.approx((18.0, 18.0))
    assert goodput.joules["redone"] == pytest.approx(3600.0)
    assert (goodput.seconds["restart_gap"], goodput.joules["restart_gap"]) == (5.0, None)
    assert goodput.elapsed_s == 45.0
    first, second = goodput.attempts
    assert (first.status, first.redone_iterations, first.gap_before_s) == ("killed", 20, 0.0)
    assert (second.first, second.last, second.gap_before_s) == (11, 20, 5.0)
    assert second.start_time_s == pytest.approx(1035.0)
    assert adds_up(goodput)


@pytest.mark.parametrize(("offset", "redone"), [(14, 6), (0, 20)])
def test_redone_part_of_a_window_is_its_share_of_repeated_iterations(offset, redone):
    goodput = Run().join().window(1).window(2).bye().restart().join(offset=offset).window(1).goodput()

    # Iterations 15 to 20 are redone: six of the ten iterations of the second window.
    assert goodput.redone_iterations == redone
    assert goodput.seconds["redone"] == pytest.approx(0.1 * redone * 9.0)


def test_repeated_iterations_repeat_their_waits_and_phases():
    """Iterations 16 to 20 are repeated: half of 1 s of data wait, and half or all of a checkpoint of 4 s."""
    run = Run(1).join().window(1).window(2, phases_s={"checkpoint": 4.0, "shutdown": 1.0}).bye()
    first, _ = run.restart().join(offset=15).window(1).goodput().attempts

    assert first.redone_iterations == 5
    assert (first.redone_around_s, first.max_redone_around_s) == pytest.approx((0.5 + 2.0, 0.5 + 4.0))


def test_a_third_attempt_redoes_work_of_both_earlier_attempts():
    run = Run(1).join().window(1).window(2).window(3).bye()
    run.restart().join(offset=20).window(1).bye()
    goodput = run.restart().join(offset=10).window(1).goodput()

    # The redone iterations are 11 to 30 of the first attempt and 21 to 30 of the second attempt. After iteration 10,
    # only the third attempt counts.
    assert [one.redone_iterations for one in goodput.attempts] == [20, 10, 0]
    assert goodput.seconds["kept"] == pytest.approx(9.0 + 9.0)


def test_unnumbered_iterations_give_a_remark_and_no_redone_time():
    run = Run(1).join(is_numbered=False).window(1).bye().restart().join(is_numbered=False).window(1)
    summary = run.summary(ended=True)

    assert (summary.goodput.redone_iterations, summary.goodput.seconds["redone"]) == (None, 0.0)
    assert [one.redone_iterations for one in summary.goodput.attempts] == [None, 0], "nothing came after the second"
    assert "number of repeated iterations unknown" in " ".join(summary_text(summary).split())


def test_redone_work_is_unknown_without_the_numbers_of_iterations():
    run = Run(1).join().window(1).bye().restart().join(is_numbered=False).window(1).bye()
    run.restart().join(offset=5).window(1).bye()
    goodput = run.restart().join(offset=10).window(1).goodput()

    # The third attempt had iterations 6 to 15; the fourth attempt began at 11 and repeated five iterations.
    assert [one.redone_iterations for one in goodput.attempts] == [None, None, 5, 0]
    assert goodput.redone_iterations is None


def test_attempt_without_iterations_before_the_first_one_has_no_part():
    """A launcher may start a world twice, and end the first one before it has an iteration."""
    run = Run(1).join().bye().restart().join(is_numbered=False).window(1).bye()
    goodput = run.restart().join(offset=5).window(1).goodput()

    assert [one.redone_iterations for one in goodput.attempts] == [0, 5, 0]


def test_redone_work_is_computed_after_a_late_iteration_number():
    run = Run(1).join(is_numbered=False).window(1).window(2).bye().restart().join(is_numbered=False)
    run.window(1)
    assert run.goodput(ended=False).redone_iterations is None

    run.join(is_numbered=True)
    run.offset = 10
    run.window(2)

    # The loop's 20th iteration has the number 30, so its first iteration was 11.
    assert run.goodput(ended=False).redone_iterations == 10


def test_rank_is_idle_before_it_joins_and_after_it_leaves():
    run = Run().join(0).window(1, 0)
    run.join(1).wait(10)
    run.send(0, 2)
    run.send(1, 2, sequence=1)
    run.send(1, 3, sequence=2, busy_s=0.0, wait_s=0.0, iteration_first=21, iteration_last=20, final=True)
    run.bye(1).window(3, 0)

    # In a run of 30 s, rank 1 joined after 10 s and left after 20 s.
    goodput = run.goodput(ended=False)
    assert goodput.rank_seconds["idle"] == pytest.approx(20.0)
    assert goodput.rank_seconds["unknown"] == pytest.approx(0.0)
    assert goodput.joules["idle"] is None
    assert adds_up(goodput)


def test_time_after_the_last_report_of_a_lost_host_is_unknown():
    run = Run().join().window(1)
    run.wait(10)
    run.send(0, 2)
    for _ in range(3):
        run.wait(10)
        run.aggregator.tick(run.now)
    run.send(0, 3, busy_s=28.0, wait_s=2.0)

    # In a run of 50 s, rank 1 sent no report after the first 10 s.
    assert run.goodput(ended=False).rank_seconds["unknown"] == pytest.approx(40.0)
    assert adds_up(run.goodput(ended=False))


def test_time_of_dropped_reports_is_unknown():
    run = Run(1).join().window(1).wait(20).window(4, sequence=4)

    assert run.seconds(ended=False) == pytest.approx({"kept": 18.0, "data": 2.0, "unknown": 20.0})


def test_late_reports_count_at_the_time_of_their_windows():
    run = Run(1).join().wait(100)
    for number in range(1, 11):
        run.send(0, number)

    assert run.seconds() == pytest.approx({"kept": 90.0, "data": 10.0})
    assert run.goodput().elapsed_s == pytest.approx(100.0)


def test_attempt_begins_with_its_earliest_report():
    # The rank had trained for 8 s when the aggregator started.
    run = Run(1).join().wait(2)
    run.send(0, 1)

    assert run.goodput(ended=False).elapsed_s == pytest.approx(10.0)
    assert adds_up(run.goodput(ended=False))


def test_straggling_and_hang_time_is_subtracted_from_other_classes():
    run = Run().join().window(1).window(2)
    ledger = run.aggregator.ledger
    ledger.goodput.attempt.move_from_kept(2, straggling_s=3.0)
    ledger.note_hang(30.0)  # a hang in the third window
    assert run.wait(40).aggregator.tick(Now(run.now_s, run.time_s)) is None
    assert run.seconds(ended=False)["hang"] == pytest.approx(30.0), "no report has it yet"
    for rank in range(2):
        run.send(rank, 3, busy_s=38.0, wait_s=2.0)
    goodput = run.goodput(ended=False)

    assert (goodput.seconds["straggling"], goodput.seconds["hang"]) == pytest.approx((1.5, 30.0))
    assert goodput.seconds["kept"] == pytest.approx(9.0 + 9.0 - 1.5 + 8.0)
    # The power is 200 W, and 1.5 s were lost.
    assert goodput.joules["straggling"] == pytest.approx(300.0)
    assert adds_up(goodput)


def test_stacks_are_requested_when_waits_for_data_begin():
    run, asked = Run().join(), []
    for number, wait_s in enumerate((0.0, 0.0, 2.0, 2.0, 0.0, 0.0), 1):
        run.window(number, busy_s=9.0 - wait_s, wait_s=wait_s)
        asked.append(run.aggregator.closed_windows.take_ranks_to_record())

    assert asked == [[], [], [0], [], [], []]


@pytest.mark.parametrize("joined", [1, 3])
def test_hang_counts_in_a_window_with_a_larger_number(joined):
    """A later attempt begins with window 3; three windows can be reported as one, with the number of the last."""
    run = Run(1).join().window(1).window(2).bye().restart().join(offset=20)
    run.aggregator.ledger.note_hang(30.0)
    run.wait(40)
    run.send(0, 2 + joined, sequence=1, busy_s=38.0, wait_s=2.0, iteration_first=1, iteration_last=10 * joined,
             iteration_shown=20 + 10 * joined)  # fmt: skip
    assert run.seconds(ended=False)["hang"] == pytest.approx(30.0)
    run.window(3 + joined, iteration_first=10 * joined + 1, iteration_last=10 * joined + 10, sequence=2)

    assert run.seconds()["hang"] == pytest.approx(30.0)
    assert run.seconds()["kept"] == pytest.approx(9.0 + 9.0 + 8.0 + 9.0)
    assert adds_up(run.goodput())


def test_hang_in_lost_reports_takes_no_time_of_later_windows():
    run = Run(1).join().window(1)
    run.aggregator.ledger.note_hang(30.0)
    run.wait(40).window(6, sequence=6)

    assert run.seconds()["kept"] == pytest.approx(18.0)
    assert run.seconds()["hang"] == pytest.approx(30.0)


def test_hang_that_ended_in_a_kill_is_subtracted_from_shutdown_time():
    run = Run(1).join().window(1)
    run.aggregator.ledger.note_hang(30.0)
    run.wait(35)
    device = device_window("GPU-0", wall=full(35.0), phases={"shutdown": full(35.0)})
    run.send(
        0, 2, busy_s=0.0, wait_s=0.0, phases_s={"shutdown": 35.0}, devices=(device,), iteration_first=11,
        iteration_last=10, final=True,
    )  # fmt: skip
    goodput = run.bye().goodput()

    assert (goodput.seconds["hang"], goodput.seconds["shutdown"]) == pytest.approx((30.0, 5.0))
    assert (goodput.joules["hang"], goodput.joules["shutdown"]) == pytest.approx((3000.0, 500.0))
    assert adds_up(goodput)


@cases(
    ("notes", "seconds"),
    [
        ([(1, {"straggling_s": 50.0})], {"straggling": 9.0, "data": 1.0}),
        # ranks that wait for a rank that is named later
        (
            [(1, {"uneven_s": 3.0}), (1, {"straggling_s": 2.0, "uneven_s": -2.0})],
            {"kept": 6.0, "straggling": 2.0, "uneven_ranks": 1.0, "data": 1.0},
        ),
        ([(1, {"straggling_s": 3.0}), (1, {"straggling_s": -50.0, "data_s": -50.0})], {"kept": 10.0}),
        ([(2, {"straggling_s": 3.0})], {"kept": 9.0, "data": 1.0}),  # an unknown window
    ],
)
def test_lost_time_moves_between_classes_within_the_time_of_its_window(notes, seconds):
    run = Run(1).join().window(1)
    for window, lost in notes:
        run.aggregator.ledger.goodput.attempt.move_from_kept(window, **lost)

    assert run.seconds() == pytest.approx(seconds)
    assert run.goodput().joules["uneven_ranks"] == pytest.approx(100.0 * seconds.get("uneven_ranks", 0.0))
    assert adds_up(run.goodput())


def test_class_seconds_are_means_over_the_ranks_of_an_attempt():
    run = Run(3).join().window(1).bye().wait(6).restart(world_size=2).join(offset=10).window(1).bye()
    goodput = run.restart(world_size=3).join(offset=20).window(1).goodput()

    assert [one.world_size for one in goodput.attempts] == [3, 2, 3]
    assert goodput.seconds["kept"] == pytest.approx(27.0)
    assert goodput.rank_seconds["kept"] == pytest.approx(27.0 + 18.0 + 27.0)
    assert goodput.rank_seconds["restart_gap"] == pytest.approx(18.0), "of the three that had worked"
    assert adds_up(goodput)


def gpus(rank, count):
    return tuple(gpu(f"GPU-{rank}-{number}") for number in range(count))


def test_device_time_of_an_attempt_is_that_of_its_own_gpus():
    """Two ranks with one GPU each train for 10 s; after a restart, one rank with four GPUs trains for 20 s."""
    run = Run().join(devices=())
    for rank in (0, 1):
        run.join(rank, devices=gpus(rank, 1))
    run.window(1).bye().wait(5).restart(1).join(devices=gpus(0, 4))
    run.window(1).window(2).bye()

    found = run.goodput()

    assert [(one.gpus, one.devices) for one in found.attempts] == [(2, 2.0), (4, 4.0)]
    assert found.unit == "GPU"
    assert found.device_seconds["restart_gap"] == pytest.approx(2 * 5.0)
    assert found.device_seconds["data"] == pytest.approx(2 * 1.0 + 4 * 2.0)
    assert sum(found.device_seconds.values()) == pytest.approx(2 * 15.0 + 4 * 20.0)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (lambda: Run(4).join(0, 1, 2).window(1, 0, 1, 2), [(3, 4.0)]),
        (
            lambda: Run(1).join(devices=()).wait(10).bye().restart(1).join(devices=gpus(0, 2)).window(1),
            [(None, 2.0), (2, 2.0)],
        ),
        (lambda: Run().join().window(1).bye(1).restore().join(0), [(2, 2.0)]),
    ],
    ids=["a rank that did not join", "an attempt that ended before its GPUs were known", "after a new aggregator"],
)
def test_unknown_gpus_of_an_attempt_are_estimated(start, expected):
    assert [(one.gpus, one.devices) for one in start().goodput().attempts] == expected


def test_new_aggregator_continues_the_goodput_account():
    run = Run().join().window(1).restore().wait(3).join().wait(7)
    for rank in range(2):
        run.send(rank, 2)

    assert run.seconds(ended=False) == pytest.approx({"kept": 18.0, "data": 2.0})


@pytest.mark.parametrize(
    ("shift_s", "boot", "gap_s"), [(-3600, "another", 0.0), (2, "another", 7.0), (3600, "boot", 5.0)]
)
def test_gap_is_of_the_unix_clock_only_after_a_reboot_and_never_negative(shift_s, boot, gap_s):
    run = Run().join().window(1).bye().wait(5)
    run.time_s += shift_s
    run.boot = boot  # on another machine, only the unix time can be compared
    run.restart().join(offset=10).window(1)

    assert run.goodput(ended=False).seconds["restart_gap"] == pytest.approx(gap_s)
    assert adds_up(run.goodput(ended=False))


def test_restart_history_is_bounded_and_newest_spans_are_shortest():
    goodput = Goodput()
    goodput.clock.advance(0.0, 0.0)
    goodput.note_last_message()
    goodput.note_hello(hello(0, 1, is_numbered=True), is_new=True)
    for number in range(1, 5001):
        goodput.clock.advance(10.0 * number, 10.0 * number)
        goodput.note_last_message()
        goodput.attempt.add_rows(number, Rows([row(0, number)]))
        goodput.attempt.add_energy(number, 1000.0, {})
    spans = goodput.attempt.spans

    assert MAX_SPANS <= len(spans) <= 2 * MAX_SPANS
    assert sum(span.last - span.first + 1 for span in spans) == 50_000
    assert all(span.window_first == span.window_last for span in spans[-MAX_SPANS // 2 :])
    goodput.end_attempt("killed")
    goodput.note_hello(hello(0, 1, offset=49_000, is_numbered=True), is_new=True)
    goodput.note_last_message()
    assert goodput.summary().redone_iterations == 1000
    assert goodput.summary().seconds["redone"] == pytest.approx(900.0)
    assert goodput.summary().joules["redone"] == pytest.approx(90_000.0)


def test_state_is_bounded_and_classes_add_up_after_1000_restarts():
    goodput = Goodput()
    for attempt in range(1100):
        goodput.clock.advance(100.0 * attempt, 100.0 * attempt)
        goodput.note_last_message()
        goodput.note_hello(hello(0, 1, offset=10 * attempt, is_numbered=True), is_new=True)
        goodput.clock.advance(100.0 * attempt + 50, 100.0 * attempt + 50)
        goodput.note_last_message()
        goodput.attempt.add_rows(1, Rows([row(0, 1, iteration_shown=10 * attempt + 10)]))
        goodput.end_attempt("killed")

    assert len(goodput.attempts) <= 1001
    assert sum(len(attempt.spans) for attempt in goodput.attempts) < 6000
    summary = goodput.summary()
    assert sum(summary.seconds.values()) == pytest.approx(summary.elapsed_s, rel=1e-6)
    assert summary.seconds["kept"] == pytest.approx(1100 * 9.0)


STEPS = st.sampled_from(
    ["window", "window", "window", "late", "lost", "bye", "join", "restore", "restart", "wait", "tick", "hang",
     "lost_time", "clock", "unused"]
)  # fmt: skip
LOST_TIMES = st.dictionaries(
    st.sampled_from(["data_s", "slow_s", "warmup_s", "straggling_s", "uneven_s"]), st.floats(-50.0, 50.0)
)


def names_of(rank, per_rank):
    return [f"GPU-{rank}"] + [f"GPU-{rank}-{number}" for number in range(1, per_rank)] if per_rank else [f"host-{rank}"]


def devices_of(rank, per_rank):
    return tuple(gpu(name, is_gpu=per_rank > 0) for name in names_of(rank, per_rank))


def windows_of(rank, per_rank, wall_s, has_energy):
    """Return the devices of a report; without energy, the window has a hole."""
    wall = full(wall_s) if has_energy else Integrals(amount(), wall_s, wall_s, wall_s, wall_s)
    return tuple(device_window(name, wall_s, wall=wall) for name in names_of(rank, per_rank))


def waterfall_adds_up(run, ended=False):
    """Check the parts against the attempts."""
    summary = run.summary(ended)
    found, attempts, goodput = summary.waterfall, summary.goodput.attempts, summary.goodput
    device_s = sum(one.elapsed_s * one.devices for one in attempts)
    device_s += sum(after.gap_before_s * before.devices for before, after in pairwise(attempts))
    has_gpus = any(one.gpus for one in attempts)
    assert goodput.unit == ("GPU" if has_gpus else "rank")
    assert sum(goodput.device_seconds.values()) == pytest.approx(device_s, rel=1e-6, abs=1e-5)
    if found is None:
        assert device_s == pytest.approx(0.0, abs=1e-5)
        return True
    unused_s = sum(one.elapsed_s * (one.unused_gpus or 0) for one in attempts)
    unused_s += sum(after.gap_before_s * (before.unused_gpus or 0) for before, after in pairwise(attempts))
    assert goodput.unused_gpu_seconds == pytest.approx(unused_s)
    total_s = device_s + unused_s
    assert sum(part.device_seconds for part in found.parts) == pytest.approx(total_s, rel=1e-6, abs=1e-5)
    assert found.device_seconds == pytest.approx(total_s, rel=1e-6, abs=1e-5)
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    joules = sum(part.joules or 0.0 for part in found.parts)
    assert joules == pytest.approx(summary.energy.measured_joules or 0.0, rel=1e-6, abs=1e-3)
    return True


@given(st.lists(STEPS, min_size=1, max_size=40), st.data())
def test_classes_add_up_to_elapsed_time_for_any_events(steps, data):
    run = Run(data.draw(st.integers(1, 3)))
    sequences, number, held, known = {}, 0, [], {}

    def join(*ranks, **changes):
        known.update(changes)
        for rank in ranks or range(run.world_size):
            stated = known["stated_gpus"] if per_rank else 0  # as an agent
            run.join(rank, devices=devices_of(rank, per_rank), **{**known, "stated_gpus": stated})

    per_rank = data.draw(st.integers(0, 3))
    join(stated_gpus=0)

    def send(rank, number, seconds):
        sequences[rank] = sequences.get(rank, 0) + 1
        share = data.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
        phase = data.draw(st.sampled_from([{}, {"checkpoint": 1.5}, {"startup": 2.0, "shutdown": 0.5}, {"odd": 1.0}]))
        devices = windows_of(rank, per_rank, seconds + sum(phase.values()), data.draw(st.booleans()))
        run.send(
            rank, number, sequence=sequences[rank], busy_s=share * seconds, wait_s=(1 - share) * seconds,
            phases_s=phase, final=data.draw(st.booleans()), devices=devices,
        )  # fmt: skip

    def check(ended):
        assert adds_up(run.goodput(ended))
        assert waterfall_adds_up(run, ended)

    for step in steps:
        ranks = range(run.world_size)
        if step == "window":
            number += 1
            run.wait(data.draw(st.floats(0.0, 20.0)))
            left_out = data.draw(st.sampled_from([None, None, *ranks]))
            for rank in ranks:
                if rank == left_out:
                    held.append((rank, number))
                else:
                    send(rank, number, data.draw(st.floats(0.0, 20.0)))
        elif step == "late" and held:
            send(*held.pop(0), 5.0)
        elif step == "lost":
            rank = data.draw(st.sampled_from(list(ranks)))
            sequences[rank] = sequences.get(rank, 0) + data.draw(st.integers(1, 5))
        elif step == "bye":
            run.bye(data.draw(st.sampled_from(list(ranks))))
        elif step == "join":
            join()
        elif step == "unused":
            join(stated_gpus=data.draw(st.integers(0, 12)))
            run.aggregator.tick(run.now)
        elif step == "restore":
            run.restore()
            join()
        elif step == "restart":
            run.restart(data.draw(st.integers(1, 3)))
            sequences, held, number = {}, [], 0
            per_rank = data.draw(st.integers(0, 3))
            join(offset=10 * data.draw(st.integers(0, 3)), is_numbered=data.draw(st.booleans()), stated_gpus=0)
        elif step in ("wait", "tick"):
            run.wait(data.draw(st.floats(0.0, 100.0)))
            if step == "tick":
                run.aggregator.tick(run.now)
        elif step == "hang":
            run.aggregator.ledger.note_hang(data.draw(st.floats(0.0, 50.0)))
        elif step == "lost_time":
            window, seconds = data.draw(st.integers(0, number + 1)), data.draw(LOST_TIMES)
            run.aggregator.ledger.goodput.attempt.move_from_kept(window, **seconds)
        elif step == "clock":
            run.time_s += data.draw(st.floats(-5000.0, 5000.0))
            run.boot = data.draw(st.sampled_from(["boot", "another"]))
        check(ended=False)
    run.aggregator.close_all()
    check(ended=True)
    energy = run.summary(ended=True).energy.measured_joules or 0.0
    joules = sum(joules or 0.0 for joules in run.goodput().joules.values())
    assert joules == pytest.approx(energy, rel=1e-6, abs=1e-3)


def test_later_byes_of_a_rank_do_not_change_its_end():
    tiles = RankTimes()
    tiles.note_bye(3, 10.0)
    tiles.note_bye(5, 11.0)
    tiles.note_bye(3, 12.0)  # an agent repeats its bye until it receives an answer

    assert list(tiles.keys) == [3, 5]
    assert tiles.column("left_axis_s").tolist() == [10.0, 11.0]


def test_all_parts_of_a_summary_have_the_same_elapsed_time():
    run = Run(1).join().wait(2)
    run.send(0, 1)
    summary = run.bye(status="completed").summary(ended=True)

    assert summary.elapsed_s == summary.goodput.elapsed_s == pytest.approx(10.0)
    assert summary.started_time_s == summary.goodput.attempts[0].start_time_s == pytest.approx(992.0)
    assert "elapsed       10 s" in summary_text(summary)


@pytest.mark.parametrize("says_bye", [True, False])
def test_delayed_messages_do_not_lengthen_the_run(says_bye):
    # The agent's clock is an hour ahead. The agent's last window ends after 20 s, and its messages arrive late.
    run = Run(1).join(time_s=4600.0, start_time_s=4599.0).wait(60)
    for number in (1, 2):
        start_s = 4599.0 + 10.0 * (number - 1)
        run.send(0, number, start_time_s=start_s, end_time_s=start_s + 10.0, final=number == 2)
    if says_bye:
        run.wait(30).bye()
    goodput = run.wait(30).goodput()

    assert goodput.elapsed_s == pytest.approx(20.0)
    assert goodput.seconds["unknown"] == pytest.approx(0.0)
    assert adds_up(goodput)


def test_time_of_a_lost_rank_ends_at_its_last_message():
    run = Run(1).join(time_s=1000.0, start_time_s=1000.0).window(1).wait(100)
    run.aggregator.heartbeat(Heartbeat(run.agent(0), 0, 15, "in an iteration", 5.0, time_s=1015.0), run.now)
    goodput = run.wait(50).goodput()

    assert goodput.elapsed_s == pytest.approx(15.0)
    assert goodput.seconds["unknown"] == pytest.approx(5.0)
    assert adds_up(goodput)


def test_rank_without_first_and_last_report_keeps_its_elapsed_time():
    run = Run(1).join(time_s=1000.0, start_time_s=1000.0).wait(15)
    run.window(2, sequence=2)
    goodput = run.wait(99.0).bye(end_time_s=1030.0).goodput()

    assert goodput.elapsed_s == pytest.approx(30.0)
    assert goodput.seconds["unknown"] == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("in_hello", "in_report", "in_bye"),
    [
        ({"time_s": 2e19}, {}, None),
        ({"start_time_s": -2e19}, {}, None),
        ({}, {"start_time_s": -2e19}, None),
        ({}, {"start_time_s": 2e19, "end_time_s": 2e19}, None),
        ({}, {}, 2e19),
    ],
)
def test_impossible_times_of_a_rank_change_the_elapsed_time_by_thirty_days_at_most(in_hello, in_report, in_bye):
    run = Run()
    run.join(0, time_s=1000.0, start_time_s=1000.0)
    run.join(1, **{"time_s": 1000.0, "start_time_s": 1000.0, **in_hello})
    run.wait(10).send(0, 1)
    run.send(1, 1, **in_report)
    run.bye(0)
    run.bye(1, status="completed", end_time_s=in_bye)
    summary = run.summary(ended=True)

    assert summary.measured_tokens == 2000
    assert summary.elapsed_s <= MAX_BEFORE_S + 10.0
    assert (in_bye is None) or summary.elapsed_s == pytest.approx(10.0)
