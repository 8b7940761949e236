"""Adds the newest values of the job to the dictionaries that a training passes to its own tracker, W&B or Trackio.

effllm makes no call of a tracker: its keys join a call of the training, once per report. The call always happens, with
the data of the training; keys of the training win. Standard library only, without I/O.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, Protocol

from effllm.trainer import ownership
from effllm.trainer.declared import text
from effllm.trainer.values import JobValues

#: Name of a sink -> the module with the tracker's class `Run`, whose method `log` gets the dictionaries.
MODULES = {"wandb": "wandb.sdk.wandb_run", "trackio": "trackio.run"}
#: Name of a sink -> name of the parameter with the dictionary.
_PARAMETERS = {"wandb": "data", "trackio": "metrics"}
#: Frameworks whose tracker is on another rank than rank 0.
_OTHER_RANK = ("megatron", "torchtitan")
_MARK = "__effllm_joins__"  # attribute of the wrapper


class ValueSource(Protocol):
    """The session whose values are added."""

    def values(self) -> JobValues:
        """Return the newest values, without waiting."""

    def warn(self, line: str) -> None:
        """Log a line through the agent."""


class _Joining:
    """The session of this process, and the reports that its trackers have."""

    def __init__(self) -> None:
        self.source: ValueSource | None = None  # while a session runs
        self.rank = self.pid = 0  # of the process that began the session
        self.newest_reports: dict[str, int] = {}  # name of a tracker -> newest report in one of its calls

    def with_new_values(self, name: str, data: Any) -> Any:
        """Return the data of a call with the values of a new report; otherwise the same data."""
        is_joined = self.newest_reports.get(name, sys.maxsize) < sys.maxsize
        if self.source is None or not is_joined or not isinstance(data, dict):
            return data
        values = self.source.values()
        if values.report <= self.newest_reports[name]:
            return data
        self.newest_reports[name] = values.report
        # Some frameworks log the contract's values themselves, under a prefix.
        has_contract = any(isinstance(key, str) and "efficientllm/" in key for key in data)
        return {**data, **values.values_for_tracker(not has_contract), **data}  # the training's values win


_JOINING = _Joining()


def begin(source: ValueSource, sinks: Collection[str], rank: int) -> None:
    """Add the values of a session to the calls of the trackers among its sinks."""
    names = sorted(MODULES.keys() & set(sinks))
    _JOINING.source, _JOINING.rank, _JOINING.newest_reports = source, rank, dict.fromkeys(names, 0)
    _JOINING.pid = os.getpid()
    if names:
        atexit.register(end, source)  # runs before the session's handler, which was registered earlier
    for name in _JOINING.newest_reports:
        if (module := sys.modules.get(MODULES[name])) is not None:
            with contextlib.suppress(Exception):  # another version; at the end one line reports that no value joined
                wrap(name, module)


def end(source: ValueSource) -> None:
    """End a session; on rank 0, report each tracker whose calls got no values."""
    if _JOINING.source is not source or _JOINING.pid != os.getpid():  # an earlier session, or a forked child
        return
    atexit.unregister(end)
    missing = [name for name, report in _JOINING.newest_reports.items() if not report]
    if _JOINING.rank == 0 and missing and source.values().report and not ownership.holder().startswith(_OTHER_RANK):
        for name in missing:
            source.warn(
                f"sink {name}: no call of {name}.log on this rank after the first report, so no value joined a run here"
            )
    _JOINING.source, _JOINING.newest_reports = None, {}


def wrap(name: str, module: ModuleType) -> None:
    """Make the method ``log`` of a tracker's runs add the values, once; also that of a run that is already open."""
    run_class = getattr(module, "Run", None)
    original = getattr(run_class, "log", None)
    if run_class is None or original is None or hasattr(original, _MARK):
        return
    run_class.log = _log_with_values(name, original)
    package = sys.modules.get(name)
    if getattr(getattr(package, "log", None), "__func__", None) is original:  # bound to the open run
        package.log = package.run.log  # type: ignore[union-attr]


def _log_with_values(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def log(run: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if args:
                args = (_JOINING.with_new_values(name, args[0]), *args[1:])
            elif (parameter := _PARAMETERS[name]) in kwargs:
                kwargs = {**kwargs, parameter: _JOINING.with_new_values(name, kwargs[parameter])}
        except Exception as error:  # noqa: BLE001 - the call of the training happens with its own data
            _JOINING.newest_reports[name] = sys.maxsize  # no further report joins this tracker
            with contextlib.suppress(Exception):
                line = f"sink {name}: its runs get no more values: {type(error).__name__}: {error}"
                if _JOINING.source is not None and _JOINING.pid == os.getpid():  # not in a forked child
                    _JOINING.source.warn(text(line))
        return original(run, *args, **kwargs)

    setattr(log, _MARK, True)
    return log
