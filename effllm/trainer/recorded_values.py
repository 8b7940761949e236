"""Percentiles of the values of instruments, as the agent has published them.

This code runs on the training thread: standard library only, no wait.
"""

from __future__ import annotations

from effllm.trainer.lifecycle import Lifecycle


class RecordedValues:
    """The values that the instruments of this process have recorded for the run folder.

    Args:
        lifecycle: the metrics of this process.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def percentiles(self, name: str) -> tuple[int, list[float]] | None:
        """Return the number of values of a name in this rank's run, and percentiles 5, 25, 50, 75, 95, 99.

        ``None`` before the agent has published them, or without the library of the extra ``instruments``.
        """
        found = self._lifecycle.percentiles().get(name)
        if not isinstance(found, list) or len(found) != 7 or not all(isinstance(one, int | float) for one in found):
            return None
        return int(found[0]), found[1:]
