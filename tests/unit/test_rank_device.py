"""trainer/rank_device.py: which GPU a process uses, with a stand-in for torch that has several GPUs and contexts."""

import threading
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from cases import cases
from fake_cuda import UUIDS, FakeTorch

from effllm.hooks import _rounds
from effllm.records.ring import RingReader, RingWriter
from effllm.trainer.declared import Declared
from effllm.trainer.rank_device import RankDevice
from effllm.trainer.watched_recorder import WatchedRecorder


class Cuda(NamedTuple):
    """A stand-in for `torch.device`."""

    index: int
    type: str = "cuda"


def on(*indices):
    return [Cuda(index) for index in indices]


def found(torch, *, current=0, parameters=()):
    """Return the facts of the GPU after one look, and the index for events."""
    declared = Declared()
    declared.set_parameter_devices(on(*parameters))
    torch.cuda.set_device(current)
    place = RankDevice(torch, declared)
    place.find_gpus()
    assert torch.cuda.current_device() == current
    return declared.facts, place.index


@cases(
    ("contexts", "memory", "parameters", "current", "expected", "events"),
    [
        ((3,), {}, (), 0, 3, 3),  # model.to("cuda:3") without set_device
        ((0, 3), {3: 9}, (), 0, None, None),  # a stray context on GPU 0, or the model's on GPU 3: which, is not known
        ((0, 3), {0: 1, 3: 9}, (), 3, None, None),  # a checkpoint that torch.load has left on GPU 0
        ((0, 3), {}, (3,), 0, 3, 3),
        ((0, 3), {0: 1, 3: 9}, (3,), 0, 3, 3),
        ((0,), {0: 1}, (3,), 0, 3, None),  # of parameters without a context nothing can be recorded
        ((), {}, (), 2, 2, None),  # set_device without a context
        ((), {}, (), 0, None, None),
    ],
)
def test_gpu_of_a_rank_is_the_one_that_it_uses(contexts, memory, parameters, current, expected, events):
    torch = FakeTorch(4, contexts)
    torch.cuda.used.update(memory)

    facts, index = found(torch, current=current, parameters=parameters)

    assert (facts.cuda_index, index) == (expected, events)
    assert facts.cuda_uuid == ("" if expected is None else UUIDS[expected])
    assert facts.cuda_pci_bus_id == ("" if expected is None else f"00000000:{16 + expected:02X}:00.0")
    assert bool(facts.unclear_gpu) is (expected is None and len(contexts) > 1)


def test_process_without_cuda_is_not_asked():
    torch = FakeTorch(2)
    torch.cuda.is_there = False

    assert not RankDevice(torch, Declared()).find_gpus()


def test_parameters_on_several_gpus_are_all_measured():
    facts, index = found(FakeTorch(4, (0, 1, 2)), parameters=(2, 1))

    assert (facts.cuda_index, facts.gpus, index) == (1, (1, 2), 1)


def test_stated_gpus_of_inference_are_measured_without_an_optimizer():
    declared = Declared()
    declared.set(serves_requests=True, gpus=(0, 1))
    torch = FakeTorch(4, (0, 1))
    torch.cuda.used.update({0: 5, 1: 5})

    RankDevice(torch, declared).find_gpus()
    assert (declared.facts.gpus, declared.facts.cuda_index, declared.facts.unclear_gpu) == ((0, 1), 0, "")


def test_gpus_of_an_earlier_training_are_forgotten():
    declared, torch = Declared(), FakeTorch(4, (0, 1, 2))
    for used in ((0, 1), (0,), (2,)):
        declared.parameter_devices = ()  # as at the end of a session
        declared.set_parameter_devices(on(*used))
        RankDevice(torch, declared).find_gpus()

    assert (declared.facts.gpus, declared.facts.cuda_uuid) == ((), UUIDS[2])


def test_parameters_on_the_host_say_nothing():
    declared = Declared()
    declared.set_parameter_devices([SimpleNamespace(type="cpu", index=None)])

    assert declared.parameter_devices == ()


class Loop:
    """A recorder of windows of two iterations on four GPUs; `sent` has the GPUs that were sent to the agent."""

    def __init__(self, torch):
        self.torch, self.declared, self.sent, self.warned = torch, Declared(), [], []
        self.writer = RingWriter(64)
        self.recorder = WatchedRecorder(
            self.writer, 2, 0, warn=self.warned.append, torch=torch, rank_device=RankDevice(torch, self.declared),
            send_facts=lambda: self.sent.append(self.declared.facts.cuda_index),
        )  # fmt: skip

    def iterate(self, count):
        for _ in range(count):
            self.torch.cuda.now_ms += 10
            self.recorder.start()
            self.torch.cuda.now_ms += 10
            self.recorder.end(100, 2)

    def close(self):
        reader = RingReader(self.writer.descriptor)
        self.recorder.finish()
        self.writer.close()
        reader.close()


def test_gpu_of_the_parameters_replaces_the_first_one():
    torch = FakeTorch(4, (0,))
    loop = Loop(torch)
    loop.iterate(2)
    torch.cuda.allocate(3, 100)
    loop.iterate(4)
    assert loop.sent == [0, None], "GPUs 0 and 3 have contexts"
    assert loop.recorder._device_times.num_iterations > 0

    loop.declared.set_parameter_devices(on(3))
    loop.iterate(1)
    loop.declared.set_parameter_devices(on(1))  # the model has moved
    torch.cuda.allocate(1, 100)
    loop.iterate(1)
    assert loop.sent == [0, None, 3, 1] and loop.warned == []
    assert torch.cuda.current_device() == 0
    loop.close()


def test_no_event_is_recorded_while_the_gpu_is_not_known():
    torch = FakeTorch(4, (0, 3))
    loop = Loop(torch)
    loop.iterate(5)
    assert (torch.cuda.made, loop.sent) == (0, [None])

    loop.declared.set_parameter_devices(on(3))
    loop.iterate(3)
    assert (torch.cuda.made > 0, loop.sent) == (True, [None, 3])
    loop.close()


def test_current_device_of_another_thread_does_not_matter():
    torch = FakeTorch(4, (2,))
    loop = Loop(torch)

    def elsewhere():
        torch.cuda.set_device(1)
        loop.iterate(3)
        assert torch.cuda.current_device() == 1

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert (loop.sent, loop.warned, torch.cuda.contexts) == ([2], [], {2})
    assert loop.recorder._device_times.num_iterations > 0
    loop.close()


def test_error_of_cuda_ends_no_step():
    torch = FakeTorch(2, (0, 1))
    torch.cuda.device_count = lambda: 1 / 0
    loop = Loop(torch)
    loop.iterate(4)

    assert set(loop.warned) == {"it is not known which GPU this process uses: ZeroDivisionError: division by zero"}
    loop.close()


class Optimizer:
    def __init__(self, *gpus):
        self.parameters = [SimpleNamespace(device=one) for one in on(*gpus)]


@pytest.fixture
def shown(monkeypatch):
    """The GPUs that steps of optimizers show; `shown.asked` has an optimizer for each look at all its parameters."""
    found = SimpleNamespace(declared=Declared(), recorder="first run", asked=[])
    monkeypatch.setattr(_rounds, "get_metrics_collector", lambda: found)
    monkeypatch.setattr(_rounds, "_parameters_in", lambda one: found.asked.append(one) or iter(one.parameters))
    found.gpus = _rounds.OptimizerGpus()
    return found


def test_optimizer_shows_its_parameters_once_in_a_window(shown):
    optimizer = Optimizer(2, 2, 3)
    for shown.declared.num_windows in (0, 0, 0, 1, 1):
        shown.gpus.declare_devices(optimizer)

    assert shown.declared.parameter_devices == (2, 3)
    assert len(shown.asked) == 2, "all, and again all, because the optimizer has two GPUs"


def test_model_that_moves_is_followed_at_the_next_window(shown):
    optimizer = Optimizer(0)
    shown.gpus.declare_devices(optimizer)
    optimizer.parameters = Optimizer(1).parameters
    shown.gpus.declare_devices(optimizer)
    assert shown.declared.parameter_devices == (0,)
    shown.declared.num_windows = 1
    shown.gpus.declare_devices(optimizer)
    assert shown.declared.parameter_devices == (1,)


def test_gpu_of_an_optimizer_that_is_gone_or_idle_is_not_measured(shown):
    warm_up, idle, optimizer = Optimizer(0), Optimizer(1), Optimizer(2)
    for one in (warm_up, idle, optimizer):
        shown.gpus.declare_devices(one)
    assert shown.declared.parameter_devices == (0, 1, 2)
    shown.asked.clear()
    del warm_up, one
    shown.declared.num_windows = 1
    shown.gpus.declare_devices(optimizer)
    assert shown.declared.parameter_devices == (1, 2)
    shown.declared.num_windows = _rounds.IDLE_WINDOWS + 1
    shown.gpus.declare_devices(optimizer)
    assert shown.declared.parameter_devices == (2,)
