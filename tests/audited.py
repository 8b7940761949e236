"""A simulated job whose framework logs a figure of its own, for tests of the audit."""

from __future__ import annotations

from typing import Any

from builders import Job, row

from effllm.records.rank import ValueStatistics


def value(number: float, count: int = 1) -> ValueStatistics:
    """Return the statistics of a value that a rank recorded ``count`` times."""
    return ValueStatistics(count=count, total=number * count, least=number, most=number)


class AuditedJob(Job):
    """Ranks with equal windows of ten iterations of one second; a tenth of the time is data wait.

    Args:
        world_size: number of ranks.
        facts: facts of every rank.
        settings: settings of the job.
        changes: fields of HELLO.
    """

    def __init__(self, world_size: int = 1, facts: Any = None, settings: Any = None, **changes: Any) -> None:
        super().__init__(world_size, **(settings or {}))
        self.number = 0
        self.join(facts=facts or {}, devices=(), **changes)

    def window(self, figures: Any = None, **counts: Any) -> None:
        """Send a window of all ranks; rank 0 records the figures of the framework."""
        self.number += 1
        self.now_s = float(self.number)
        values = {name: value(number) for name, number in (figures or {}).items()}
        for rank in range(self.world_size):
            known = {"devices": (), "values": values if values and rank == 0 else None, **counts}
            self.send(row(rank, self.number, **known))

    def windows(self, number: int, figures: Any = None, **counts: Any) -> AuditedJob:
        """Send windows; ``figures`` may be a function of the window's number, from 1."""
        for _ in range(number):
            self.window(figures(self.number + 1) if callable(figures) else figures, **counts)
        return self

    def printed(self) -> list[str]:
        """Return the texts of the new events of the audit."""
        return [event.text for event in self.events() if event.kind in ("audit", "mfu")]

    @property
    def figure(self) -> Any:
        """The only figure of the audit."""
        (found,) = self.summary().audit.figures
        return found
