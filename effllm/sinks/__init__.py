"""Where reports go.  A name in ``EFFICIENTLLM_SINKS`` is a file in this folder.

Each file has one function, ``open_sink(run: Run) -> Sink``, which raises `SinkUnavailable` with one
sentence where it cannot work.  Every sink is called from a thread of its own (effllm/aggregation/server.py), so it
may block; what it raises silences nobody else.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from effllm.config import Config
from effllm.schema import ClusterReport, Event, RankReport, Summary


class SinkUnavailable(Exception):
    """The sink cannot work here; the message is one sentence that says why and what to do."""


@dataclass(frozen=True)
class Run:
    """What a sink may know about the run when it is opened."""

    config: Config
    attempt: int
    folder: Path | None  # the run folder, None where there is none
    tensorboard_dir: Path | None  # where event files go
    stdout: TextIO
    facts: dict[str, Any] = field(default_factory=dict)  # what run.json holds
    tell: Callable[[str], None] = lambda _: None  # makes an event of one line about the sink itself


class Sink(Protocol):
    """A place that reports go to."""

    def write(self, report: ClusterReport, rows: Sequence[RankReport]) -> None:
        """Take one window of the job and the rows of its ranks."""

    def event(self, event: Event) -> None:
        """Take something that happened to the measurement."""

    def summarize(self, summary: Summary) -> None:
        """Take the run as it stands: every minute, and last of all at the end."""

    def update_facts(self, facts: dict[str, Any]) -> None:
        """Take what is known about the run, whenever more of it is."""

    def close(self) -> None:
        """Finish what was begun; may be called twice."""


@runtime_checkable
class Keeper(Protocol):
    """A sink that can also keep the aggregator's state, so that a killed one is replaced without loss."""

    def keep(self, state: bytes) -> bool:
        """Replace the kept state; return whether that and all that was written before is safe."""


@runtime_checkable
class Shelf(Protocol):
    """A sink that can also keep files that are told of in an event: the stacks of trainers that stand."""

    def store(self, name: str, text: str) -> None:
        """Keep a file; its name may have a folder in it."""


@runtime_checkable
class Chronicle(Protocol):
    """A sink to which many events at once cost less than one after the other: ten thousand ranks leave together."""

    def events(self, events: Sequence[Event]) -> None:
        """Take things that happened to the measurement, oldest first."""


def sink_names() -> list[str]:
    """Return the names of all sink files, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def open_sink(name: str, run: Run) -> Sink:
    """Open the sink ``name``.

    Raises:
        SinkUnavailable: no such file, its library is missing, or it cannot work here.
    """
    if name not in sink_names():
        raise SinkUnavailable(f"there is no sink {name!r}; there are: {', '.join(sink_names())}")
    sink: Sink = import_sink(name).open_sink(run)
    return sink


def import_sink(name: str) -> Any:
    """Import the file of a sink.

    Raises:
        SinkUnavailable: its library is missing; the message says how to install it.
    """
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        extras = metadata.metadata("effllm").get_all("Provides-Extra") or []
        how = f"pip install 'effllm[{name}]'" if name in extras else "install it"
        raise SinkUnavailable(f"sink {name!r} needs a package that is not installed ({error}): {how}") from error
