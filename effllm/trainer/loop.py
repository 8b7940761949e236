"""Functions for a user's own training loop: `effllm.count`, `sync_point`, `set_peer_group`, `phase` and `monitor`.

These functions run in the training process and never raise into the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from effllm.trainer.collector import MetricsCollector, get_metrics_collector, initialize_efficientllm_metrics
from effllm.trainer.session import status_after


def count(
    tokens: int | None = None,
    samples: int | None = None,
    tokens_processed: int | None = None,
    tokens_loss: int = 0,
    loss: float | None = None,
) -> None:
    """Add counts to the running iteration, in a loop whose steps a hook detects.

    In a loop of plain torch, a hook that the environment attaches detects the iterations; only the tokens need this
    call.  In this example an iteration has four micro-batches, so `effllm.count` is called four times::

        for step, batch in enumerate(loader):
            mask = batch["attention_mask"]                    # on the CPU: 8 sequences of 512, some padded
            effllm.count(tokens=int(mask.sum()), tokens_processed=mask.numel(), samples=len(mask))
            loss = model(**to_gpu(batch)).loss / 4
            loss.backward()
            if step % 4 == 3:
                optimizer.step()                              # an iteration of 32 samples, 16384 positions
                optimizer.zero_grad()

    Pass the counts of this rank only.  The call does nothing while metrics are off.  If the owner of the iterations
    has its own counts, as a Trainer has, these counts are ignored.

    Args:
        tokens: number of positions without padding, used for TT; by default ``tokens_processed``.
        samples: number of sequences.
        tokens_processed: number of all positions; by default ``tokens``.
        tokens_loss: number of positions with a label.
        loss: loss of the iteration, as a number; if several calls have a loss, the last loss is used.
    """
    get_metrics_collector().count(tokens, samples, tokens_processed, tokens_loss, loss)


def sync_point() -> None:
    """Mark the first point in an iteration at which this rank waits for other ranks: before gradients are summed.

    In synchronous training the iterations of all ranks take equally long, so iteration times do not show a slow rank.
    The time from the start of an iteration to this call is the rank's own time::

        loss = model(batch)
        with ddp.no_sync(): loss.backward()
        effllm.sync_point()
        all_reduce_gradients(ddp)

    If gradients are summed while ``backward`` runs, call this function directly before ``backward``.  The call reads
    one clock and does not wait.  The call does nothing between iterations, or while metrics are off.
    """
    get_metrics_collector().sync_point()


def set_peer_group(name: str, replica: str = "") -> None:
    """Set the group of ranks with the same work: a rank is only compared with its group.

    Megatron's hooks call this function.

    Args:
        name: name of the group, such as ``stage 3``; ranks with different EFFICIENTLLM_ROLE are never compared.
        replica: name shared by ranks that wait for each other before the sync point, such as ``replica 0`` in tensor
            or pipeline parallelism.  Among these ranks, the time before the sync point does not show the slow rank.
    """
    get_metrics_collector().set_peer_group(name, replica)


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Exclude a period from the iterations: ``with effllm.phase("evaluation"): ...``.

    Args:
        name: ``evaluation``, ``checkpoint`` or ``generation``; any other name counts as ``other``.
    """
    return get_metrics_collector().phase(name)


class Monitor:
    """The object of ``with effllm.monitor(...) as m``; call `iteration` once per iteration."""

    def __init__(self, collector: MetricsCollector) -> None:
        self._collector = collector
        self._num_iterations = 0  # that have ended

    def iteration(self, tokens: int = 0, samples: int = 0, loss: float | None = None) -> dict[str, float]:
        """End an iteration and begin the next iteration; return the newest values of the whole job."""
        self._collector.record_iteration_end(tokens, samples)
        self._num_iterations += 1
        values = self._collector.log_own(self._collector.declared.facts.first_iteration + self._num_iterations, loss)
        self._collector.record_iteration_start()
        return values

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """See `effllm.phase`."""
        return self._collector.phase(name)


@contextlib.contextmanager
def monitor(parameters: int | None = None, **arguments: Any) -> Iterator[Monitor]:
    """Measure a loop: ``with effllm.monitor(parameters=n) as m: ... m.iteration(tokens=t, samples=s)``.

    Args:
        parameters: number of parameters of the whole model.
        arguments: arguments of `initialize_efficientllm_metrics`.
    """
    collector = initialize_efficientllm_metrics(parameters, **arguments)
    collector.record_iteration_start()
    try:
        yield Monitor(collector)
    except BaseException as error:
        collector.stop_collection(status_after(error))
        raise
    collector.stop_collection("completed")
