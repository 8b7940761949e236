"""Values of instruments: recorded for the agent, and their percentiles as the agent has published them.

This code runs on the training thread: standard library only, no wait.
"""

from __future__ import annotations

from effllm.trainer.lifecycle import Lifecycle

#: Maximum number of names whose index is stored here; if a loop creates more names, the later names are ignored.
MAX_KNOWN_NAMES = 1000


class RecordedValues:
    """The values that the instruments of this process record while a run is active.

    Args:
        lifecycle: the metrics of this process.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._indices: dict[str, int] = {}  # -1: there are too many names

    def record(self, name: str, value: float) -> None:
        """Record a value for the run folder; does nothing while metrics are not collected.

        Args:
            name: for example ``loss``, or with its unit ``timing/forward_seconds``.
            value: NaN and infinite values are counted; a value that is not a float is ignored, with a warning.
        """
        recorder = self._lifecycle.recorder
        if recorder is None or not recorder.is_on:  # a forked child must not add names
            return
        index = self._indices.get(name)
        if index is None:
            if len(self._indices) >= MAX_KNOWN_NAMES:
                return
            index = self._indices[name] = self._lifecycle.declared.value_index(name)
        if type(value) is float and index >= 0:
            recorder.value(index, value)
        elif index >= 0:
            self._lifecycle.warn(f"value {name} must be a float, not {type(value).__name__}; the value is ignored")

    def percentiles(self, name: str) -> tuple[int, list[float]] | None:
        """Return the number of values of a name in this rank's run, and percentiles 5, 25, 50, 75, 95, 99.

        ``None`` before the agent has published them, or without the library of the extra ``instruments``.
        """
        found = self._lifecycle.percentiles().get(name)
        if not isinstance(found, list) or len(found) != 7 or not all(isinstance(one, int | float) for one in found):
            return None
        return int(found[0]), found[1:]
