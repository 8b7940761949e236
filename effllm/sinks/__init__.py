"""The sinks of reports.  Each name in ``EFFICIENTLLM_SINKS`` is that of a file in this folder or of a tracker.

Each file has a function ``open_sink(run: RunInfo) -> Sink``, which raises `SinkUnavailable` with one sentence if the
sink cannot work.  A sink with options also has ``OPTIONS``, a table of `Option`: ``SINKS=prometheus:port=9788`` sets
``run.options["port"]``.  Each sink is called from a thread of its own (effllm/server/outputs.py), so a sink may block.
Exceptions of a sink become events, and the other sinks continue.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TextIO

import msgspec
from msgspec import Struct

from effllm.config.setting_values import ValueType
from effllm.config.settings import Config
from effllm.records.device_state import DeviceFeed
from effllm.records.forecast import FORECAST, foretold_values
from effllm.records.identity import Identity
from effllm.records.job import ClusterReport, Summary
from effllm.records.plain_text import one_line, without_user

#: Sinks without a file: the trackers whose calls in the training get the values.
TRAINING_TRACKERS = ("trackio", "wandb")
#: Sinks that use `RunInfo.devices`, which is filled from the first window on, before the sink is open.
SINKS_WITH_DEVICES = frozenset({"otlp"})

_ADDRESS = re.compile(r"<[^<>]* object at 0x[0-9a-f]+>:? ?")  # differs in each text


class SinkUnavailable(Exception):
    """The sink cannot work here. The message is one sentence with the reason and the remedy."""


class WriteFailed(Exception):
    """A tracker could not be reached, or has rejected the values."""

    lost = 0  # number of earlier windows whose values are lost too


class FirstFailure:
    """Keeps the text of the first failure since a success: each different text would become a separate event.

    The texts of libraries may contain the address of a server with a password, which is removed.
    """

    def __init__(self) -> None:
        self._text = ""

    def error_of(self, text: str, lost: int = 0) -> WriteFailed:
        """Return an exception with the first failure's text; with it ``lost`` earlier windows are lost."""
        self._text = self._text or _ADDRESS.sub("", one_line(without_user(text)))
        error = WriteFailed(self._text)
        error.lost = lost
        return error

    def note_success(self) -> None:
        self._text = ""


class Option(NamedTuple):
    """One option of a sink: its default as a text, its type, and its help text."""

    default: str
    value_type: ValueType
    meaning: str


@dataclass(frozen=True)
class RunInfo:
    """The run for which a sink is opened."""

    config: Config
    attempt: int
    folder: Path | None  # run folder; None without a usable run folder
    tensorboard_dir: Path | None  # folder of event files; None without a usable folder or without this sink
    stdout: TextIO
    facts: dict[str, Any] = field(default_factory=dict)  # content of run.json
    log: Callable[[str], None] = lambda _: None  # reports an event about the sink
    summary: Callable[[], Summary | None] = lambda: None  # summary of the ended job; available before sinks are closed
    identity: Callable[[], Identity] = Identity  # newest identity of the run; any thread may call this
    devices: DeviceFeed = field(default_factory=DeviceFeed)  # newest states, if a sink is in SINKS_WITH_DEVICES
    fact: Callable[[str], Any] = lambda _: None  # newest fact of the run by its name, or None; any thread may call this
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the sink, with defaults; see `open_sink`


class Sink(Protocol):
    """An output for reports.

    A sink with a method ``event(event: Event) -> None`` also receives every event.
    """

    def write(self, report: ClusterReport) -> None:
        """Write one window of the job."""

    def close(self) -> None:
        """Write buffered data and release resources. May be called twice."""


class JobValue(Struct, frozen=True, forbid_unknown_fields=True):
    """A value of the job in addition to the metrics: its help text, and its names in outputs."""

    text: str
    otlp: tuple[str, str, str] | None = None  # name, kind and unit of the metric
    tensorboard: tuple[str, str] | None = None  # tag and unit
    lasting: Literal["", "total", "fact"] = ""  # total (only grows) and fact are true until a new report


JOB_VALUES = msgspec.toml.decode(Path(__file__).with_name("values.toml").read_bytes(), type=dict[str, JobValue]) | {
    f"{name}{end}": JobValue(f"{text}, at the rate so far{which}.")
    for name, text in FORECAST.items()
    for end, which in (("", ""), ("_low", ": lower end of its interval"), ("_high", ": upper end of its interval"))
}


def job_values(report: ClusterReport) -> dict[str, float]:
    """Return the known values of a report, by name in `JOB_VALUES`."""
    counts, coverage, slowest = report.job.counts, report.coverage, report.straggler
    values: dict[str, float | None] = {
        "iterations": counts.iterations,
        "tokens": counts.tokens or None,  # 0: the loop does not report this count
        "samples": counts.samples or None,
        "generated_tokens": counts.generated_tokens or None,
        "losses_not_finite": counts.losses_not_finite,
        "energy_measured_joules": report.job.energy.measured_j,
        "reports_lost": coverage.reports_lost,
        "reports_late": coverage.reports_late,
        "ranks_expected": coverage.ranks_expected,
        "gpus_expected": coverage.gpus_expected,
        "simulated": int(report.simulated),
        "elapsed_seconds": report.job.goodput.elapsed_s,
        "gpus_unused": report.gpus_unused,
        "iteration": report.iteration,
        "attempt": report.attempt,
        "ranks_reporting": coverage.ranks_reporting,
        "gpus_measured": coverage.gpus_measured,
        "doubtful_values": len(report.doubtful) or None,
        "loss": report.loss,
        **foretold_values(report.forecast),
        "energy_coverage_ratio": coverage.energy,
        "straggler_rank": None if slowest is None else slowest.rank,
        "straggler_time_ratio": None if slowest is None else slowest.time_s / slowest.median_s,
    }
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


class WrittenByTraining:
    """A sink of `TRAINING_TRACKERS`: the training process, which has opened the run, adds the values to its own calls.

    A second writer would need W&B's shared mode and a server (see effllm/trainer/trackers.py).
    """

    def write(self, report: ClusterReport) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""


def sink_names() -> list[str]:
    """Return the names of all sinks, without importing their files."""
    return sorted([*TRAINING_TRACKERS, *(module.name for module in pkgutil.iter_modules(__path__))])


def no_such_sink(name: str) -> str:
    """Return the error text for a sink without a file."""
    return f"there is no sink {name!r}; available sinks: {', '.join(sink_names())} (the run folder is always written)"


def open_sink(name: str, run: RunInfo) -> Sink:
    """Open the sink ``name`` with its options from the run's settings.

    Raises:
        SinkUnavailable: unknown sink, missing library, wrong option, or the sink cannot work here.
    """
    if name not in sink_names():
        raise SinkUnavailable(no_such_sink(name))
    options = read_options(name, run.config.sink_options().get(name, {}))
    if name in TRAINING_TRACKERS:
        return WrittenByTraining()
    try:
        sink: Sink = import_sink(name).open_sink(replace(run, options=options))
    except ImportError as error:
        raise _not_installed(name, error) from error
    return sink


def options_of(name: str) -> dict[str, Option]:
    """Return the options in the file of a sink, which `import_sink` imports."""
    declared: dict[str, Option] = {} if name in TRAINING_TRACKERS else getattr(import_sink(name), "OPTIONS", {})
    return declared


def read_options(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of all options of a sink: the given texts or defaults, read by the options' types."""
    options = options_of(name)
    for key in given:
        if key not in options:
            raise SinkUnavailable(
                f"sink {name!r} has no option {key!r}; available options: {', '.join(options) or 'none'}"
            )
    values = {}
    for key, option in options.items():
        text = given.get(key, option.default)
        try:
            values[key] = option.value_type.read(text)
        except ValueError:
            shown, allowed = without_user(text), option.value_type.allowed
            raise SinkUnavailable(f"{name}:{key}={shown!r} is not usable: must be {allowed}") from None
    return values


def import_sink(name: str) -> Any:
    """Import the file of a sink.

    Raises:
        SinkUnavailable: the library of the sink is missing; the message has the command of its installation.
    """
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise _not_installed(name, error) from error


def _not_installed(name: str, error: ImportError) -> SinkUnavailable:
    extras = metadata.metadata("effllm").get_all("Provides-Extra") or []
    how = f"pip install 'effllm[{name}]'" if name in extras else "install it"
    return SinkUnavailable(f"sink {name!r} needs a package that is not installed ({error}): {how}")
