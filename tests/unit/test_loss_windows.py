"""The windows to which the evidence of a verdict points, and where a loss is relative to them."""

import pytest
from builders import device_window, gpu, hello, reports, row
from cases import cases, repeats
from msgspec.structs import replace
from sink_examples import make_summary

from benchmarks.planted.job import THRESHOLDS as PLANTED
from benchmarks.planted.reports import summary_of_planted
from benchmarks.planted.timeline import planned, timeline
from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.job.ledger import restore
from effllm.job.losses import Loss
from effllm.job.prevalence import ERRORS, RETRIES, MemoryPressure, Prevalence
from effllm.job.rows import Rows
from effllm.job.verdict import windows_of
from effllm.records.clock import Now
from effllm.records.job import StragglerVerdict
from effllm.records.rank import CLOCK_RATIO, Gauge, Profile, ValueStatistics
from effllm.records.verdict import AFTER, BEFORE, IN, NO_WINDOW, LossWindows
from effllm.records.wire import Bye

MAX_HZ = 2e9
GPU = gpu(sm_clock_max_hz=MAX_HZ, sm_clock_reference_hz=MAX_HZ, power_limit_default_w=700.0)


def run(aggregator, changes, windows=20, start_s=0.0):
    """Pass windows of one rank, of ten iterations and 10 s without a data wait; changes are by number of window."""
    aggregator.hello(hello(0, 1, devices=(GPU,), job=aggregator.ledger.job), Now(start_s, 1000.0 + start_s))
    for number in range(1, windows + 1):
        now = Now(start_s + 10.0 * number, 1000.0 + start_s + 10.0 * number)
        end = {"start_time_s": now.unix_s - 10.0, "end_time_s": now.unix_s}
        one = row(0, number, **{"busy_s": 10.0, "wait_s": 0.0, **end, **changes.get(number, {})})
        assert aggregator.reports(reports(one), now)
        aggregator.tick(now)
    aggregator.bye(Bye("agent-0", 0, "completed", 10 * windows), now)
    return now


def evidence(changes):
    """Return the evidence of the verdict on a job with these windows, by the first word of its claim."""
    aggregator = Aggregator(Config(), "job", 1, 1000.0)
    now = run(aggregator, changes)
    found = aggregator.summary(now.unix_s, ended=True).verdict.evidence
    return {one.claim.split()[0]: one for one in found}


def test_windows_of_exposed_communication_are_windows_with_profiles():
    """40 %, 20 % and 5 % of the profiled time is exposed in three of 20 windows; the threshold is 15 %."""
    exposed = {3: 2.0, 5: 1.0, 7: 0.25}
    changes = {at: {"profile": Profile(5, 5.0, exposed_s=one, computing_s=5.0 - one)} for at, one in exposed.items()}

    found = evidence(changes)["exposed"]

    assert (found.place, found.windows) == (IN, LossWindows(2, 30, 50, 30, pytest.approx(0.4), 3))


def test_windows_of_an_idle_device_are_without_retries_of_the_allocator():
    """The device is idle for half of the profiled time of two windows; in window 6 the allocator also retries."""
    profile = Profile(5, 5.0, computing_s=2.5)
    retries = {RETRIES: ValueStatistics(1, 1.0, 1.0, 1.0)}

    found = evidence({4: {"profile": profile}, 6: {"profile": profile, "values": retries}})["device"]

    assert (found.place, found.windows) == (IN, LossWindows(1, 40, 40, 40, pytest.approx(0.5), 1))


def clocked(clock, limit_w, **reasons):
    """Return the changes of a window with this clock as a share of the maximum; reasons hold for the whole time."""
    gauges = {
        CLOCK_RATIO: Gauge(10 * clock, 10.0, clock, clock),
        "power_limit_w": Gauge(10 * limit_w, 10.0, limit_w, limit_w),
    }
    window = device_window(gauges=gauges, throttled_s=reasons, throttle_covered_s=10.0)
    return {"devices": (window,), "own_steps": 10, "own_step_s": 8.0}


@pytest.mark.parametrize(
    ("word", "limit_w", "reasons"),
    [
        ("throttled", 700.0, {"sw_thermal": 10.0, "any": 10.0}),
        ("power", 350.0, {"power_cap": 10.0}),
    ],
)
def test_windows_of_low_clocks_are_above_the_threshold(word, limit_w, reasons):
    """At 75 %, 50 % and 98 % of the clock, 2 s, 4 s and 0.16 s of an own time of 8 s are lost in windows of 10 s."""
    changes = {at: clocked(clock, limit_w, **reasons) for at, clock in {2: 0.75, 4: 0.5, 6: 0.98}.items()}

    found = evidence(changes)[word]

    assert (found.place, found.windows) == (IN, LossWindows(2, 20, 40, 40, pytest.approx(0.4), 20))


def closed_window(**changes):
    """Return the reports of a window and its report, with changes."""
    aggregator = Aggregator(Config(), "job", 1, 1000.0)
    run(aggregator, {}, windows=1)
    ((report, rows, _),) = aggregator.closed.take()
    return Rows(rows), replace(report, **changes)


def test_windows_with_unused_gpus_have_their_share():
    """One GPU is used: one unused GPU is half of the GPUs, and three are three quarters."""
    found = Prevalence()
    for number, unused in enumerate((None, 0, 1, 3, 0), 1):
        found.close(*closed_window(gpus_unused=unused, iteration=10 * number), 0.0, {})

    assert found.of("unused_gpus") == LossWindows(2, 30, 40, 40, 0.75, 4)


def test_hang_is_in_its_window_also_without_iterations():
    """6 of 10 s without progress; then a window without iterations, with 2 s."""
    found = Prevalence()
    found.close(*closed_window(iteration=10), 6.0, {})
    found.close(*closed_window(iteration=20), 0.0, {})
    found.close(*closed_window(iteration=20, iteration_last=0), 2.0, {})

    assert found.of("hang") == LossWindows(2, 10, 20, 10, pytest.approx(0.6))
    assert found.windows == 2


@pytest.mark.parametrize(
    ("status", "attempts", "place"), [("stalled", 2, AFTER), ("running", 1, AFTER), ("killed", 2, NO_WINDOW)]
)
def test_hang_without_a_later_window_is_after_the_last_window(status, attempts, place):
    seen = Prevalence()
    for number in (1, 2):
        seen.close(*closed_window(iteration=10 * number), 0.0, {})
    loss = Loss("hang", 1.0, 0.5, "", "")

    found = windows_of(loss, replace(make_summary(), status=status, attempts=attempts), seen)

    assert found == (LossWindows(1, 20, 20) if place == AFTER else None, place)


def attempts_of(count):
    """Return the aggregator of the last of several attempts of two windows, with 100 s between their starts."""
    aggregator = Aggregator(Config(), "job-1", 1, 1000.0)
    run(aggregator, {}, windows=2)
    for number in range(2, count + 1):
        ledger = restore(aggregator.snapshot()).next_attempt(f"job-{number}")
        aggregator = Aggregator(Config(), f"job-{number}", number, 1000.0, ledger)
        run(aggregator, {}, windows=2, start_s=100.0 * (number - 1))
    return aggregator


def test_start_and_restarts_are_before_the_first_windows_of_attempts():
    aggregator = attempts_of(3)

    found = aggregator.summary(1220.0, ended=True).verdict.evidence

    seen = aggregator.ledger.prevalence
    assert seen.of("startup") == LossWindows(1, 10, 10)
    assert seen.of("restarts") == LossWindows(2, 10, 10)
    assert [(one.place, one.windows) for one in found if "restarts" in one.claim] == [(BEFORE, LossWindows(2, 10, 10))]


def test_memory_pressure_points_to_the_windows_with_retries_and_the_error():
    pressure = MemoryPressure()
    read = {"allocator/allocated_bytes": ValueStatistics(1, 1e9, 1e9, 1e9)}
    for number, retries in enumerate((0, 2, 3, 0, 1, 0), 1):
        found = {RETRIES: ValueStatistics(1, retries, retries, retries)} if retries else {}
        pressure.close(Rows([row(0, number, values={**read, **found})]))
    error = {ERRORS: ValueStatistics(1, 1.0, 1.0, 1.0)}
    pressure.close(Rows([row(0, 7, values=error, final=True)]))

    loss = pressure.loss()
    assert (loss.windows, loss.first_iteration, loss.last_iteration, loss.worst_iteration) == (3, 20, 50, 30)
    assert pressure.out_of_memory({}).iteration == 70
    summary = replace(make_summary(), memory_pressure=loss)
    one = Loss("memory_pressure", 1.0, 0.5, "", "")
    assert windows_of(one, summary, Prevalence()) == (LossWindows(3, 20, 50, 30), IN)


def test_stragglers_with_several_causes_have_no_windows_of_one_cause():
    slow = StragglerVerdict((3,), "gpu-17", "", 1, 0.2, 9.0, 7, "own time", "SM clock 1.1 GHz", 80.0, None, ("clock",))
    loss = Loss("throttled", 1.0, 0.5, "", "summary.json: stragglers, ranks 3")
    seen = Prevalence(9, {"straggler": LossWindows(4, 10, 90, 20, 0.3)})
    summary = replace(make_summary(), stragglers=(slow,))

    assert windows_of(loss, summary, seen) == (LossWindows(4, 10, 90, 20, 0.3, 9), IN)
    both = replace(summary, stragglers=(slow, replace(slow, differences=())))
    assert windows_of(loss, both, seen) == (None, NO_WINDOW)


def test_ranks_that_joined_late_have_no_window():
    assert windows_of(Loss("idle", 1.0, 0.5, "", ""), make_summary(), Prevalence(5)) == (None, NO_WINDOW)


@cases("cause", sorted(PLANTED)[: repeats(2, 100)])
def test_evidence_of_each_planted_cause_has_windows(cause):
    found = summary_of_planted(timeline(planned(cause, 1))).verdict

    name = {"unused_gpus": "unused GPUs"}.get(cause, cause.replace("_", " "))
    one = next(one for one in found.evidence if one.claim.startswith(name))
    assert found.cause == cause
    assert one.place == (BEFORE if cause == "restarts" else IN)
    assert one.windows.count >= 1
    assert one.windows.measured is None or one.windows.count <= one.windows.measured
