"""The calls of a training loop's own: `effllm.count`, `sync_point`, `set_peer_group`, `phase` and `monitor`.

Runs in the training process: the standard library alone, and nothing here raises into the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from effllm.trainer.collector import MetricsCollector, get_metrics_collector, initialize_efficientllm_metrics


def count(
    tokens: int | None = None,
    samples: int | None = None,
    tokens_processed: int | None = None,
    tokens_loss: int = 0,
    loss: float | None = None,
) -> None:
    """Count what the running iteration works on; from anywhere in a loop whose steps something else sees.

    A loop of plain torch that is attached by the environment has its iterations seen, and this one call gives
    the tokens; an iteration of four micro-batches calls it four times::

        for step, batch in enumerate(loader):
            mask = batch["attention_mask"]                    # on the CPU: 8 sequences of 512, some padded
            effllm.count(tokens=int(mask.sum()), tokens_processed=mask.numel(), samples=len(mask))
            loss = model(**to_gpu(batch)).loss / 4
            loss.backward()
            if step % 4 == 3:
                optimizer.step()                              # an iteration of 32 samples, 16384 positions
                optimizer.zero_grad()

    Counts are this rank's share.  Where metrics are off this does nothing, and where the owner of the iterations
    counts them itself, as a Trainer does, what is given here is left aside.

    Args:
        tokens: positions without padding, which make TT; ``tokens_processed`` where not given.
        samples: sequences.
        tokens_processed: all positions; ``tokens`` where not given.
        tokens_loss: positions with a label.
        loss: of the iteration, as a number; of several the last one counts.
    """
    get_metrics_collector().count(tokens, samples, tokens_processed, tokens_loss, loss)


def sync_point() -> None:
    """Mark that this rank has come to where it first waits for others in this iteration: before gradients are summed.

    In synchronous training every rank's iterations take equally long, so they do not show which of them is slow. What
    lies between the start of an iteration and this call is the rank's own::

        loss = model(batch)
        with ddp.no_sync(): loss.backward()
        effllm.sync_point()
        all_reduce_gradients(ddp)

    Where gradients are summed while ``backward`` runs, the last moment before it is the place. One clock is read and
    nothing is waited for; where metrics are off, or between iterations, this does nothing.
    """
    get_metrics_collector().sync_point()


def set_peer_group(name: str, replica: str = "") -> None:
    """Set which ranks do the same work as this one, so that it is compared with them alone; hooks of Megatron do.

    Args:
        name: the same for all of them, as ``stage 3``; ranks of another EFFICIENTLLM_ROLE are never compared.
        replica: the same for all ranks that wait for each other before the sync point, as ``replica 0`` in tensor or
            pipeline parallelism: of those, the time before it does not show which is slow.
    """
    get_metrics_collector().set_peer_group(name, replica)


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Mark a stretch that is not iteration: ``with effllm.phase("evaluation"): ...``."""
    return get_metrics_collector().phase(name)


class Monitor:
    """What ``with effllm.monitor(...) as m`` gives: one call per iteration."""

    def __init__(self, collector: MetricsCollector) -> None:
        self._collector = collector
        self._done = 0

    def iteration(self, tokens: int = 0, samples: int = 0, loss: float | None = None) -> dict[str, float]:
        """End an iteration and begin the next; return the newest values of the whole job."""
        self._collector.record_iteration_end(tokens, samples)
        self._done += 1
        values = self._collector.log_own(self._collector.declared.facts.first_iteration + self._done, loss)
        self._collector.record_iteration_start()
        return values

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Mark a stretch that is not iteration."""
        return self._collector.phase(name)


@contextlib.contextmanager
def monitor(parameters: int | None = None, **arguments: Any) -> Iterator[Monitor]:
    """Measure a loop: ``with effllm.monitor(parameters=n) as m: ... m.iteration(tokens=t, samples=s)``.

    Args:
        parameters: parameters of the whole model.
        arguments: those of `initialize_efficientllm_metrics`.
    """
    collector = initialize_efficientllm_metrics(parameters, **arguments)
    collector.record_iteration_start()
    try:
        yield Monitor(collector)
    except KeyboardInterrupt:
        collector.stop_collection("interrupted")
        raise
    except BaseException:
        collector.stop_collection("failed")
        raise
    collector.stop_collection("completed")
