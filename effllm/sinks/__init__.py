"""Where reports go.  A name in ``EFFICIENTLLM_SINKS`` is a file in this folder.

Each file has one function, ``open_sink(run: Run) -> Sink``, which raises `SinkUnavailable` with one
sentence where it cannot work.  Every sink is called from a thread of its own (effllm/server/writer.py), so it
may block; what it raises becomes an event, and the other sinks go on.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TextIO

from effllm.config import Config
from effllm.records.job import ClusterReport, Summary


class SinkUnavailable(Exception):
    """The sink cannot work here; the message is one sentence that says why and what to do."""


@dataclass(frozen=True)
class Run:
    """The run that a sink is opened for."""

    config: Config
    attempt: int
    folder: Path | None  # the run folder, None where there is none
    tensorboard_dir: Path | None  # where event files go
    stdout: TextIO
    facts: dict[str, Any] = field(default_factory=dict)  # what run.json holds
    log: Callable[[str], None] = lambda _: None  # makes an event of one line about the sink itself
    summary: Callable[[], Summary | None] = lambda: None  # of the job, once it has ended: before sinks are closed


class Sink(Protocol):
    """A place that reports go to.

    A sink that also has a method ``event(event: Event) -> None`` gets every event as well.
    """

    def write(self, report: ClusterReport) -> None:
        """Write one window of the job."""

    def close(self) -> None:
        """Finish what was begun; may be called twice."""


def sink_names() -> list[str]:
    """Return the names of all sink files, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def no_such_sink(name: str) -> str:
    """Return what is wrong with the name of a sink for which there is no file."""
    return f"there is no sink {name!r}; there are: {', '.join(sink_names())} (the run folder is always written)"


def open_sink(name: str, run: Run) -> Sink:
    """Open the sink ``name``.

    Raises:
        SinkUnavailable: no such file, its library is missing, or it cannot work here.
    """
    if name not in sink_names():
        raise SinkUnavailable(no_such_sink(name))
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
