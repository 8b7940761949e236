"""Sums that a GPU computes later, with fake events and fake pinned_memory memory on the CPU."""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from effllm.hooks import _batches  # noqa: E402
from effllm.hooks._batches import LateSums, LazyNumber  # noqa: E402

pytestmark = pytest.mark.torch


class Event:
    """An event that happens when the test sets `has_happened`."""

    def __init__(self):
        self.has_happened = False
        self.was_waited_for = False

    def record(self):
        pass

    def query(self):
        return self.has_happened

    def synchronize(self):
        self.has_happened = self.was_waited_for = True


class Buffer:
    """Pinned memory: a copy arrives with its event, and a read before the event fails."""

    def __init__(self, copied):
        self.copied = copied
        self.coming = self.event = None

    def copy_(self, row, non_blocking):
        assert non_blocking
        self.coming = row.tolist()
        self.copied.append(self)

    def tolist(self):
        assert self.event.has_happened, "read before the copy was done"
        return self.coming


@pytest.fixture
def gpu(monkeypatch):
    """Return a LateSums that treats OnDevice as a GPU's tensor, with its events and buffers."""
    events, buffers, copied = [], [], []

    def make_buffer(_num_values):
        buffers.append(Buffer(copied))
        return buffers[-1]

    def make_event(device):
        events.append(Event())
        events[-1].device = device
        copied[-1].event = events[-1]
        return events[-1]

    monkeypatch.setattr(_batches, "pinned_memory", make_buffer)
    monkeypatch.setattr(_batches, "recorded_event", make_event)
    return LateSums(2), events, buffers


GPUS = [type("device", (), {"type": "cuda"}) for _ in range(2)]
UNKNOWN = type("device", (), {"type": "unknown"})


class OnDevice:
    """A tensor with one number, on a fake GPU."""

    def __init__(self, value, gpu=GPUS[0]):
        self.value, self.device = torch.tensor(value), gpu

    def __int__(self):
        raise AssertionError("this would wait for the GPU")


@pytest.fixture(autouse=True)
def stacking(monkeypatch):
    """Let torch.stack accept OnDevice."""
    real = torch.stack
    monkeypatch.setattr(torch, "zeros_like", lambda one: OnDevice(0, one.device))

    def stack(ones):
        (_gpu,) = {one.device for one in ones}  # torch cannot stack tensors of two GPUs
        return real([one.value for one in ones])

    monkeypatch.setattr(torch, "stack", stack)


def test_numbers_and_cpu_tensors_are_read_at_once(gpu):
    sums, events, _ = gpu
    sums.add_numbers((3, torch.tensor(4)))
    sums.add_numbers((1, 1))

    assert sums.take_sums() == [4, 5]
    assert sums.take_sums() == [0, 0]
    assert events == []


def test_gpu_sums_are_read_after_their_event_without_waiting(gpu):
    sums, events, _ = gpu
    sums.add_numbers((2, OnDevice(10)))
    assert sums.take_sums() == [2, 0]

    sums.add_numbers((2, OnDevice(20)))
    events[0].has_happened = True

    assert sums.take_sums() == [2, 10]
    assert not any(event.was_waited_for for event in events)


def test_sums_without_a_finished_event_are_read_at_the_end(gpu):
    sums, events, _ = gpu
    for value in (1, 2, 3):
        sums.add_numbers((1, OnDevice(value)))
    events[0].has_happened = True
    known = sums.take_sums()

    rest = sums.wait_and_take_sums()

    assert [a + b for a, b in zip(known, rest, strict=True)] == [3, 6]
    assert sums.wait_and_take_sums() == [0, 0]


def test_numbers_of_each_gpu_have_an_event_of_this_gpu(gpu):
    sums, events, _ = gpu
    sums.add_numbers((OnDevice(1, GPUS[1]), OnDevice(2, GPUS[0])))

    assert [event.device for event in events] == [GPUS[1], GPUS[0]]
    events[0].has_happened = True
    assert sums.take_sums() == [1, 0]
    assert sums.wait_and_take_sums() == [0, 2]


def test_memory_is_reused(gpu):
    sums, events, buffers = gpu
    for value in range(100):
        sums.add_numbers((OnDevice(value), 0))
        events[-1].has_happened = True
        sums.take_sums()

    assert len(buffers) == 1


def test_tensor_on_an_unknown_device_is_not_counted():
    sums = LateSums(1)

    assert not sums.add_numbers((OnDevice(1, UNKNOWN),))
    assert sums.take_sums() == [0]


class LossOnGpu:
    """A loss of 2.5 on a fake GPU."""

    is_cuda, dtype, device = True, torch.float32, GPUS[0]

    def numel(self):
        return 1

    def detach(self):
        return torch.tensor([2.5])

    def __float__(self):
        raise AssertionError("this would wait for the GPU")


def test_loss_on_a_gpu_is_read_only_after_its_copy_is_complete(monkeypatch):
    event, pinned = Event(), torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "device", lambda _gpu: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *_, dtype, pin_memory: pinned)
    loss = LazyNumber(3, LossOnGpu())

    assert loss.value_if_ready() is None
    event.has_happened = True
    assert loss.value_if_ready() == 2.5
    assert not event.was_waited_for
