"""trainer/cuda_graphs.py with a stand-in for CUDAGraph: captures, replays, and steps that were captured."""

import sys
from types import SimpleNamespace

import pytest

from effllm.trainer.cuda_graphs import CudaGraphs


class Torch:
    """A stand-in for torch, whose stream is being captured or not."""

    def __init__(self, monkeypatch):
        self.is_capturing = False
        self.cuda = SimpleNamespace(is_current_stream_capturing=lambda: self.is_capturing)
        monkeypatch.setitem(sys.modules, "torch", self)
        torch = self

        class Graph:
            def capture_begin(self, pool=None):
                torch.is_capturing = True

            def capture_end(self):
                torch.is_capturing = False

            def replay(self):
                return "replayed"

        self.Graph = Graph


@pytest.fixture
def torch(monkeypatch):
    return Torch(monkeypatch)


@pytest.fixture
def graphs(torch):
    found = CudaGraphs()
    found.watch_class(torch.Graph)
    return found


class Optimizer:
    """A stand-in for an optimizer."""


def test_replay_names_the_optimizers_whose_steps_its_graph_has(torch, graphs):
    seen, step, forward, optimizer = [], torch.Graph(), torch.Graph(), Optimizer()
    graphs.on_replay = seen.append
    step.capture_begin(pool=1)
    assert graphs.keep_if_captured(optimizer)
    step.capture_end()
    forward.capture_begin()
    forward.capture_end()
    assert not graphs.keep_if_captured(optimizer)

    assert (step.replay(), forward.replay(), graphs.num_captured) == ("replayed", "replayed", 2)
    assert seen == [[optimizer], []]


def test_error_in_effllm_does_not_reach_the_replay(torch, graphs):
    graphs.on_replay = lambda _optimizers: 1 / 0

    assert torch.Graph().replay() == "replayed"


def test_step_after_a_capture_that_failed_is_a_step(torch, graphs):
    torch.Graph().capture_begin()
    torch.is_capturing = False  # an error has ended the capture without a call of capture_end

    assert not graphs.keep_if_captured(Optimizer())


def test_class_is_watched_once(torch, graphs):
    replay = torch.Graph.replay
    graphs.watch_class(torch.Graph)
    CudaGraphs().watch_class(torch.Graph)

    assert torch.Graph.replay is replay
