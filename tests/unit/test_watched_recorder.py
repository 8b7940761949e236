"""trainer/watched_recorder.py with a fake torch: the values in windows."""

from contextlib import contextmanager
from types import SimpleNamespace

import builders
import pytest
from fake_cuda import FakeTorch
from pytest import approx

from effllm.agent.window import WindowCutter
from effllm.job.account import Account, Rows
from effllm.metrics.throughput import computation_seconds, device_step_seconds, exposed_seconds
from effllm.network.transport import FrameError, decode_from_agent, encode
from effllm.records import ring
from effllm.records.job import JobConstants
from effllm.records.rank import Profile
from effllm.records.ring import RingReader, RingWriter
from effllm.records.timeline import KINDS, Split
from effllm.trainer import watched_recorder as watched
from effllm.trainer.declared import Declared
from effllm.trainer.rank_device import RankDevice
from effllm.trainer.torch_profile import Profiled
from effllm.trainer.watched_recorder import MAX_PENDING, DeviceTime, WatchedRecorder

MS = 1_000_000


def device_time():
    """Return the times of a GPU, and the fake torch.cuda."""
    torch = FakeTorch()
    place = RankDevice(torch, Declared())
    place.find_gpus()
    return DeviceTime(torch.cuda, place), torch.cuda


def step(device, cuda, start_ms, end_ms):
    cuda.now_ms = start_ms
    device.mark_start()
    cuda.now_ms = end_ms
    device.mark_end()


def test_iteration_time_is_read_when_the_next_iteration_ends():
    device, cuda = device_time()

    step(device, cuda, 10, 30)
    assert device.num_iterations == 0, "its own end is too early to read"
    step(device, cuda, 40, 55)
    step(device, cuda, 60, 70)

    # The two read iterations took 20 ms and 15 ms; the last iteration is not read yet.
    assert (device.num_iterations, device.total_ns) == (2, 35 * MS)


def test_late_device_causes_no_wait_and_no_new_cuda_events():
    device, cuda = device_time()
    cuda.done_ms = -1
    for number in range(20):
        step(device, cuda, 10 * number, 10 * number + 5)
    assert (device.num_iterations, cuda.made) == (0, 2 * MAX_PENDING)

    cuda.done_ms = float("inf")
    step(device, cuda, 200, 207)
    step(device, cuda, 210, 217)
    step(device, cuda, 220, 227)

    # Events were recorded in 4 of the 20 iterations of 5 ms; then one iteration of 7 ms was read.
    assert (device.num_iterations, device.total_ns) == (MAX_PENDING + 1, 27 * MS)
    assert cuda.made == 2 * MAX_PENDING


@pytest.mark.parametrize("why", ["no CUDA yet", "no context yet", "a graph is captured"])
def test_no_cuda_event_is_recorded_without_cuda_or_in_a_capture(why):
    torch = FakeTorch(contexts=() if why == "no context yet" else (0,))
    cuda, place = torch.cuda, RankDevice(torch, Declared())
    cuda.is_there, cuda.captured = why != "no CUDA yet", {0} if why == "a graph is captured" else set()
    device = DeviceTime(cuda, place)
    place.find_gpus()
    step(device, cuda, 10, 30)
    assert cuda.made == 0

    cuda.is_there, cuda.captured = True, set()
    cuda.allocate(0, 1)
    place.find_gpus()
    step(device, cuda, 40, 50), step(device, cuda, 60, 70)
    assert device.total_ns == 10 * MS


def test_only_the_captured_iteration_has_no_device_time():
    device, cuda = device_time()
    cuda.now_ms = 10
    device.mark_start()
    cuda.captured = {0}
    device.mark_end()
    cuda.captured = set()
    step(device, cuda, 40, 50), step(device, cuda, 60, 70)

    assert (device.num_iterations, device.total_ns, cuda.made) == (1, 10 * MS, 4), "two pairs, as before"


class Given:
    """A profiler that returns the test's splits at their iterations."""

    def __init__(self, splits):
        self.splits, self.number, self.closed, self.is_of_device = splits, 0, False, False

    def start_if_due(self, number):
        self.number = number

    def end(self, ended_ns):
        split = self.splits.get(self.number)
        return None if split is None else Profiled(split, self.is_of_device, 3 * MS)

    def close(self, failed):
        self.closed = True


@contextmanager
def recording(splits=None, cuda=None, offset=0):
    writer = RingWriter(64)
    reader = RingReader(writer.descriptor)
    torch = cuda and cuda.torch
    place = RankDevice(torch, Declared()) if torch else None
    recorder = WatchedRecorder(writer, 2, offset, warn=(warned := []).append, torch=torch, rank_device=place)
    recorder._profile = Given(splits or {})
    try:
        yield SimpleNamespace(recorder=recorder, reader=reader, warned=warned)
    finally:
        reader.close()
        writer.close()


@pytest.fixture
def cuda():
    """Return the fake torch.cuda, with its module."""
    torch = FakeTorch()
    torch.cuda.torch = torch
    return torch.cuda


def iterate(recorder, count, cuda=None, synchronizes=False):
    """Iterate every 200 ms; iteration n takes 100 + n ms on the device, of which 60 + n ms are before a sync point."""
    for number in range(recorder.ordinal + 1, recorder.ordinal + count + 1):
        start_ns = number * 200 * MS

        def after(milliseconds, start_ns=start_ns):
            return lambda: start_ns + milliseconds * MS

        if cuda:
            cuda.now_ms = number * 200
        recorder.start(_now=after(0))
        if cuda:
            cuda.now_ms += 60 + number
        if synchronizes:
            recorder.sync_point(_now=after(5))  # the host runs far ahead of the device
        if cuda:
            cuda.now_ms += 40
        recorder.end(8, 1, _now=after(10 if synchronizes else 100))


def rows(slots, finish=True):
    cutter = WindowCutter("agent", 0, 2, 0, 0, 0.0)
    for slot in slots:
        cutter.add_record(slot)
    found = []
    while (row := cutter.take_report([])) is not None:
        found.append(row)
    return [*found, cutter.take_last_report([], 10**12)] if finish else found


SPLIT = Split(100 * MS, 40 * MS, 25 * MS, 60 * MS, 15 * MS, {"tp": (30 * MS, 20 * MS), "all_gather": (10 * MS, 5 * MS)})


def test_profiled_iterations_are_summed_in_their_window():
    with recording({2: SPLIT, 3: SPLIT, 4: SPLIT}) as made:
        iterate(made.recorder, 5)
        slots = made.reader.read_new()
    first, second, rest = rows(slots)

    once = {"tp": (approx(0.03), approx(0.02)), "all_gather": (approx(0.01), approx(0.005))}
    seconds = {"time_s": 0.1, "communication_s": 0.04, "exposed_s": 0.025, "computing_s": 0.06, "cost_s": 0.003}
    assert (first.profile.iterations, second.profile.iterations, rest.profile) == (1, 2, None)
    assert first.profile.kinds == once
    for name, known_s in seconds.items():
        assert getattr(first.profile, name) == approx(known_s)
        assert getattr(second.profile, name) == approx(2 * known_s)

    # Profiles that arrive after a cut are in the next window.
    cutter = WindowCutter("agent", 0, 2, 0, 0, 0.0)
    is_early = [slot.kind == ring.ITERATION and slot.ordinal <= 2 for slot in slots]
    for slot in (slot for slot, early in zip(slots, is_early, strict=True) if early):
        cutter.add_record(slot)
    assert cutter.take_report([]).profile is None
    for slot in (slot for slot, early in zip(slots, is_early, strict=True) if not early):
        cutter.add_record(slot)
    assert cutter.take_report([]).profile.iterations == 3


def test_data_wait_before_a_profiled_step_is_not_idle_time():
    with recording({1: SPLIT, 2: SPLIT._replace(duration_ns=140 * MS, idle_ns=55 * MS)}) as made:
        made.recorder.start(_now=lambda: 1)
        made.recorder.add_data_wait(10 * MS)  # of 100 ms: wait 10, computation 60, exposed communication 25, so idle 5
        made.recorder.end(_now=lambda: 100 * MS + 1)
        made.recorder._profile.is_of_device = True
        iterate(made.recorder, 1)
        first = rows(made.reader.read_new())[0].profile

    assert first.time_s == approx(0.090 + 0.140)


@pytest.mark.parametrize("synchronizes", [False, True])
def test_device_times_belong_to_the_window_of_their_reading(cuda, synchronizes):
    with recording(cuda=cuda) as made:
        iterate(made.recorder, 5, cuda, synchronizes)
        made.recorder.finish()
        found = rows(made.reader.read_new())

    # Iteration n takes 100 + n ms and is read at the end of iteration n + 1.  So the windows have the iterations (1),
    # (2, 3), (4).
    assert [row.device_steps for row in found] == [1, 2, 1]
    assert [row.device_step_s for row in found] == [approx(0.101), approx(0.205), approx(0.104)]
    if synchronizes:  # after 60 + n ms on the device, and 5 ms on the host
        assert [row.device_own_steps for row in found] == [1, 2, 1]
        assert [row.device_own_step_s for row in found] == [approx(0.061), approx(0.125), approx(0.064)]
        assert (found[0].own_steps, found[0].own_step_s) == (2, approx(0.010))
        assert cuda.made <= 3 * MAX_PENDING


def test_profiled_iterations_have_the_logged_iteration_numbers():
    numbers = []
    with recording(offset=1000) as made:
        made.recorder._profile.start_if_due = numbers.append
        iterate(made.recorder, 2)

    assert numbers == [1001, 1002]


def test_profiler_is_closed_at_the_end_and_not_called_again():
    with recording({3: SPLIT}) as made:
        iterate(made.recorder, 2)
        made.recorder.finish()
        assert made.recorder._profile.closed
        made.recorder._profile.number = None
        iterate(made.recorder, 1)

        assert made.recorder._profile.number is None


def test_exposed_time_and_computation_add_up_to_latency():
    profile = Profile(2, 1.0, 0.5, 0.2, 0.6, 0.05, {"dp": (0.5, 0.2)})
    other = Profile(1, 0.5, 0.2, 0.1, 0.4, 0.02, {"dp": (0.1, 0.1), "tp": (0.1, 0.0)})
    account = Account()
    rows = [
        builders.row(0, profile=profile, device_steps=10, device_step_s=8.5),
        builders.row(1, profile=other, device_steps=5, device_step_s=4.4),
        builders.row(2),
    ]
    account.add_rows(Rows(rows))
    totals = account.totals(JobConstants())

    assert totals.profile == profile + other
    assert totals.profile.kinds == {"dp": (0.6, approx(0.3)), "tp": (0.1, 0.0)}
    # AL is 9 s / 10 iterations = 0.9 s, of which 0.3 s / 1.5 s = 20 % are exposed.
    assert exposed_seconds(totals) == approx(0.18)
    assert computation_seconds(totals) == approx(0.72)
    assert device_step_seconds(totals) == approx(0.88), "of the rank with the slowest mean"


def test_impossible_profile_is_rejected():
    message = builders.reports(builders.row(0, profile=Profile(1, 0.1, kinds={"dp": (0.05, 0.01)})))
    assert decode_from_agent(encode(message)) == message

    for wrong in (
        Profile(1, -0.1),
        Profile(1, float("nan")),
        Profile(-1, 0.1),
        Profile(1, 0.1, kinds={"dp": (0.1, float("inf"))}),
        Profile(1, 0.1, kinds={"made up": (0.1, 0.1)}),
    ):
        with pytest.raises(FrameError):
            decode_from_agent(encode(builders.reports(builders.row(0, profile=wrong))))


def test_kinds_of_collectives_fit_into_a_profile_record():
    assert len(KINDS) < 2**15 and ring.WHOLE not in range(len(KINDS)) and ring.COMPUTING not in range(len(KINDS))
    assert watched.KINDS is KINDS


@pytest.mark.parametrize("fails_at_sync_point", [False, True])
def test_failing_device_is_disabled_with_one_warning(cuda, fails_at_sync_point):
    with recording(cuda=cuda) as made:
        if fails_at_sync_point:
            made.recorder.start(_now=lambda: MS)
            cuda.fails = True
            made.recorder.sync_point(_now=lambda: 2 * MS)
            made.recorder.end(8, 1, _now=lambda: 3 * MS)
        cuda.fails = True
        iterate(made.recorder, 4 - made.recorder.ordinal, cuda)
        slots = made.reader.read_new()

    (line,) = made.warned
    assert "illegal memory access" in line
    assert [slot.ordinal for slot in slots if slot.kind == ring.ITERATION] == [1, 2, 3, 4]
    assert rows(slots)[0].own_steps == fails_at_sync_point
