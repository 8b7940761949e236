"""Benchmarks: the counter of live storages, the truth for `effllm fit`, and short real jobs with a planted cause."""

import pytest

from benchmarks.planted.job import THRESHOLDS
from benchmarks.planted.real import run_real
from benchmarks.planted.timeline import planned, timeline


@pytest.mark.torch
def test_bytes_of_a_step_are_those_counted_by_hand():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = torch.ones(16, 4)

    def loss():
        return model(rows).sum()

    loss().backward()
    optimizer.step()
    found = pytest.importorskip("benchmarks.memory.counted").count_step(model, optimizer, [loss], [rows])

    # Weights of 8 x 4 and 2 x 8; the momentum has the same size.
    assert (found.weights, found.gradients, found.states) == (192, 192, 192)
    # In the backward pass of ReLU: its output, the gradient of its output and that of its input, each 16 x 8, and the
    # loss with its gradient. The gradient of the second matrix exists, that of the first one does not.
    assert found.activations == 3 * 16 * 8 * 4 + 2 * 4
    assert found.peak == 192 + 192 + 2 * 8 * 4 + found.activations


@pytest.mark.torch
def test_a_kept_tensor_is_counted_until_it_is_gone():
    torch = pytest.importorskip("torch")
    storages = pytest.importorskip("benchmarks.memory.counted").Storages()
    with storages:
        kept = torch.zeros(100)
        view = kept[:10]
        del kept
        alive = sum(change for _, change in storages.log)
        del view

    assert alive == 400
    assert sum(change for _, change in storages.log) == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("cause", THRESHOLDS)
def test_verdict_on_a_real_job_is_the_planted_cause(cause, seed, tmp_path, library):
    summary = run_real(timeline(planned(cause, seed, is_short=True)), tmp_path, library)

    assert summary.verdict.cause == cause, summary.verdict
    assert (summary.attempts > 1) == (cause == "restarts")
