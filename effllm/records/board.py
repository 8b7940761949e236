"""The board: shared memory in which the agent publishes the job's newest values to its training process.

Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from effllm.records.facts import to_document
from effllm.records.shared_memory import RingError, SharedDocument, make_memory, map_memory
from effllm.records.spans import ANSWERS_BYTES, SpanAnswers

#: Tag of the number of values that depend on a failed check of the audit; it has no value while all checks hold.
DOUBTFUL = "health/doubtful_values"

GROUP = "EffLLM"  # of the values that most people look for, in TensorBoard and in trackers
#: The values in the logs of Hugging Face's Trainer: tag of reports -> (key, factor of the value).
LOGGED: dict[str, tuple[str, float]] = {
    "throughput/tokens_per_second_per_gpu": ("tokens_per_second_per_gpu", 1.0),
    "throughput/mfu_ratio": ("mfu", 1.0),
    "energy/joules_per_token": ("joules_per_token", 1.0),
    "energy/total_joules": ("energy_kwh", 1 / 3.6e6),
}
#: The foretold end of the job: name in a forecast -> (key, factor of the value).
FORETOLD: dict[str, tuple[str, float]] = {
    "remaining_seconds": ("remaining_hours", 1 / 3600),
    "end_energy_joules": ("end_energy_kwh", 1 / 3.6e6),
    "end_co2_kg": ("end_co2_kg", 1.0),
    "end_electricity_cost": ("end_electricity_cost", 1.0),
    "end_gpu_cost": ("end_gpu_cost", 1.0),
}
#: The values that the aggregator publishes to the training processes, besides those of the contract; the training adds
#: them to its own calls of a tracker, such as W&B.  Tag of reports -> (key in a tracker, factor of the value).
TRACKED: dict[str, tuple[str, float]] = {
    **{tag: (f"{GROUP}/{key}", factor) for tag, (key, factor) in LOGGED.items()},
    "throughput/data_wait_ratio": (f"{GROUP}/data_wait", 1.0),
    "goodput/ratio": ("efficientllm-goodput/ratio", 1.0),
    DOUBTFUL: ("efficientllm-health/doubtful_values", 1.0),
    **{
        f"forecast/{name}{end}": (f"{GROUP}/{key}{end}", factor)
        for name, (key, factor) in FORETOLD.items()
        for end in ("", "_low", "_high")
    },
}
#: Sinks that write into the run of the user's tracker.
TRACKERS = ("mlflow", "trackio", "wandb")

_STATE_BYTES, _DEVICES_BYTES, _VALUES_BYTES = 32 * 1024, 8 * 1024, 16 * 1024
_VALUES_AT = _STATE_BYTES + _DEVICES_BYTES + ANSWERS_BYTES
BOARD_BYTES = _VALUES_AT + _VALUES_BYTES


@dataclass(frozen=True)
class JobState:
    """The job's newest state that an agent has received."""

    report: int = 0  # number of the newest report; 0 before the first
    iteration: int = 0  # last iteration of the newest report
    values: Mapping[str, float] = field(default_factory=dict)  # by tag
    admitted_by: str = ""  # endpoint of the aggregator that has admitted the agent


class Board:
    """A shared map with one `JobState`, the facts of the rank's devices, the answers about spans, and percentiles.

    Without a descriptor, a new map is made.

    Raises:
        RingError: there is not enough memory, or the descriptor is not a board.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = make_memory("effllm-board", BOARD_BYTES) if descriptor is None else descriptor
        if os.fstat(self.descriptor).st_size < BOARD_BYTES:
            raise RingError("the shared memory is too short for a board of effllm")
        memory = map_memory(self.descriptor, BOARD_BYTES)
        self._document = SharedDocument(memory, 0, _STATE_BYTES)  # the `JobState`
        self.devices = SharedDocument(memory, _STATE_BYTES, _DEVICES_BYTES)  # `SpanPart.device` -> facts
        self.spans = SpanAnswers(memory, _STATE_BYTES + _DEVICES_BYTES)
        # Name of an instrument's value -> number of values of this rank so far, and their `values.PERCENTILES`.
        self.values = SharedDocument(memory, _VALUES_AT, _VALUES_BYTES)
        self._state = JobState()  # the newest that was read

    def write_state(self, state: JobState) -> bool:
        """Replace the state; ``False`` if it is too large."""
        return self._document.write_document(to_document(state))

    def read_state(self) -> JobState:
        """Return the newest complete state, without waiting."""
        if (document := self._document.take_new()) is not None:
            self._state = _state_of(document) or self._state
        return self._state

    def admitted_by(self) -> str:
        """Return the endpoint that has admitted the agent, or an empty string; any thread may call this method."""
        return str((self._document.read_document() or {}).get("admitted_by", ""))

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped while the board is used."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _state_of(document: Mapping[str, Any]) -> JobState | None:
    """Return the state in a document; ``None`` if a field has another type, because shared memory is not trusted."""
    try:
        state = JobState(**document)
        numbers = {tag: float(value) for tag, value in state.values.items()}
        return JobState(int(state.report), int(state.iteration), numbers, str(state.admitted_by))
    except (AttributeError, OverflowError, TypeError, ValueError):
        return None
