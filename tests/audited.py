"""A simulated job whose framework logs a figure of its own, for tests of the audit."""

from __future__ import annotations

from typing import Any

from builders import gpu, hello, reports, row

from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.records.clock import Now
from effllm.records.rank import ValueStatistics


def value(number: float, count: int = 1) -> ValueStatistics:
    """Return the statistics of a value that a rank recorded ``count`` times."""
    return ValueStatistics(count=count, total=number * count, least=number, most=number)


class AuditedJob:
    """Ranks with equal windows of ten iterations of one second; a tenth of the time is data wait.

    Args:
        world_size: number of ranks.
        facts: facts of every rank.
        gpu_name: name of the GPU of each rank; without a name, the ranks have no GPU.
        settings: settings of the job.
        changes: fields of HELLO.
    """

    def __init__(
        self, world_size: int = 1, facts: Any = None, gpu_name: str = "", settings: Any = None, **changes: Any
    ):
        self.world_size, self.number = world_size, 0
        self.aggregator = Aggregator(Config(**(settings or {})), "job", 1, 1000.0)
        for rank in range(world_size):
            devices = (gpu(f"GPU-{rank}", name=gpu_name),) if gpu_name else ()
            known = {"facts": facts or {}, "devices": devices, **changes}
            assert self.aggregator.hello(hello(rank, world_size, **known), Now(0.0, 1000.0)) == ""

    def window(self, figures: Any = None, **counts: Any) -> None:
        """Send a window of all ranks; rank 0 records the figures of the framework."""
        self.number += 1
        values = {name: value(number) for name, number in (figures or {}).items()}
        for rank in range(self.world_size):
            known = {"devices": (), "values": values if values and rank == 0 else None, **counts}
            self.aggregator.reports(reports(row(rank, self.number, **known)), Now(self.number, 1000.0 + self.number))

    def windows(self, number: int, figures: Any = None, **counts: Any) -> AuditedJob:
        """Send windows; ``figures`` may be a function of the window's number, from 1."""
        for _ in range(number):
            self.window(figures(self.number + 1) if callable(figures) else figures, **counts)
        return self

    def printed(self) -> list[str]:
        """Return the texts of the new events of the audit."""
        return [event.text for event in self.aggregator.events.take_events() if event.kind in ("audit", "mfu")]

    def summary(self) -> Any:
        return self.aggregator.summary(2000.0, False)

    @property
    def figure(self) -> Any:
        """The only figure of the audit."""
        (found,) = self.summary().audit.figures
        return found
