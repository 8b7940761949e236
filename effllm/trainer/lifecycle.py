"""Starts and stops of the metrics in this process, with the declared facts and the newest values.

After an error, one line is printed and the metrics are missing; the training continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from effllm.config.place import Place, read_place
from effllm.config.settings import VARIABLES, Config, ConfigError, read_config
from effllm.config.switches import is_off, process_environ
from effllm.network.listening import DiscoveryError
from effllm.records.board import Board
from effllm.records.plain_text import without_user
from effllm.records.shared_memory import RingError
from effllm.trainer import trackers
from effllm.trainer.address import print_line
from effllm.trainer.declared import Declared
from effllm.trainer.recorder import Recorder
from effllm.trainer.session import AgentError, Session, standard_descriptors
from effllm.trainer.values import JobValues
from effllm.trainer.without_metrics import repeat_at_exit

MAX_START_S = 10.0


def facts_of_mlflow_run(run: Any) -> dict[str, str | None]:
    """Return the id and the tracking URI of a run of MLflow; the URI is without user and password."""
    service: Any = sys.modules.get("mlflow.tracking._tracking_service.utils")
    uri = service.get_tracking_uri() if service is not None else None
    return {
        "mlflow_run_id": str(run.info.run_id),
        "mlflow_tracking_uri": without_user(uri) if isinstance(uri, str) else None,
    }


def facts_of_open_mlflow_run(sinks: Collection[str]) -> dict[str, str | None]:
    """Return the facts of the run that is open in this thread, if the sink ``mlflow`` is chosen; otherwise none.

    There is no I/O: MLflow keeps the open run of a thread in memory.
    """
    fluent: Any = sys.modules.get("mlflow.tracking.fluent")
    if "mlflow" not in sinks or fluent is None:
        return {}
    try:
        run = fluent.active_run()
        return {} if run is None else facts_of_mlflow_run(run)
    except Exception:  # noqa: BLE001 - another version of MLflow; MLFLOW_RUN_ID works without this function
        return {}


class Lifecycle:
    """Consecutive sessions, each from a start to its stop.

    ``overrides`` are fields of `Config` that replace the environment's settings, unless they are ``None``.
    """

    def __init__(self, **overrides: float | None) -> None:
        self.declared = Declared(self._send_facts)
        self.config: Config | None = None  #: settings of the last session
        self.recorder: Recorder | None = None  #: recorder of the running session
        self.is_for_requests = False  #: whether a request, and not a training, started the session
        self.overrides = overrides
        self._place = Place()  # place of this rank in the last session
        self._given_place: Place | None = None  # from `configure`; replaces the place in the environment
        self._session: Session | None = None  # while it runs
        self._values = JobValues()  # of the last session
        self._percentiles: dict[str, Any] = {}  # name of a value -> number of values, and the six of `percentiles`
        self._lock = threading.RLock()  # a signal handler may stop what its thread is starting
        self.span_chains: weakref.WeakSet[Any] = weakref.WeakSet()  #: `SpanChain`s, which also read the last answers

    def configure(self, collection_interval_s: float | None = None, place: Place | None = None) -> None:
        """Set values that replace the environment's settings at the next start; ``None`` changes nothing."""
        if collection_interval_s is not None:
            self.overrides["collection_interval_s"] = collection_interval_s
        self._given_place = place or self._given_place

    @contextlib.contextmanager
    def one_thread(self) -> Iterator[None]:
        """Let one thread start or stop a session at a time; no call of the running loop takes this lock."""
        # A child that was forked while another thread had the lock goes on after the limit.
        has_lock = self._lock.acquire(timeout=MAX_START_S)
        try:
            yield
        finally:
            if has_lock:
                self._lock.release()

    def start_session(self) -> None:
        """Start a session, unless metrics are off; after an error, print one line."""
        if is_off(process_environ()):
            return
        try:
            self._place = self._given_place or read_place(process_environ())
            self.config = _config_with(self.overrides)
            self._values = JobValues()  # the reports of a new run are numbered from 1 again
            self._percentiles = {}
            self.declared.declare_run_facts(facts_of_open_mlflow_run(self.config.sink_options()))
            with standard_descriptors() as closed:  # numbers of the standard descriptors that were closed
                self._session = Session(self.config, self._place, self.declared)
                self.recorder = self._session.recorder
                self._session.start()
            if {1, 2} & set(closed) and self._session is not None:  # a signal handler may have ended the session
                self._session.warn("stdout or stderr is closed: metrics and warnings are only in the run folder")
            repeat_at_exit("")  # there are metrics
            trackers.begin(self, self.config.sink_options(), self._place.rank)
        except (ConfigError, RingError, DiscoveryError, OSError, RuntimeError, MemoryError) as error:
            # RuntimeError: the search for the aggregator cannot start a thread
            if self._place.rank == 0 or isinstance(error, AgentError):
                print_line(f"no metrics, training goes on: {error}")
            repeat_at_exit(str(error) if self._place.rank == 0 else "")
            if self._session is not None:
                self._session.close()
            self._session = self.recorder = None

    def start_for_requests(self, facts: Mapping[str, Any], gpus: Sequence[int] = ()) -> None:
        """Start a session for an inference process; a later training ends this session and has its own run."""
        self.declared.declare(gpus=tuple(gpus), serves_requests=True)
        self.declared.declare_run_facts(facts)
        self.start_session()
        self.is_for_requests = self.recorder is not None

    def stop(self, status: str) -> None:
        """End the session; rank 0 waits up to 5 s for the summary."""
        session = self._session
        if session is None:
            return
        began_unix_s = time.time()
        for chain in list(self.span_chains):
            chain.end_span()
        trackers.end(self)
        session.finish(status)
        for chain in list(self.span_chains):
            chain.read_answers(session.board)
        self._read_percentiles()  # of the whole run
        self.values().use_summary(session.final_values(began_unix_s))
        self._session = self.recorder = None
        session.close()
        self.is_for_requests = False
        self.declared.set(serves_requests=False, warnings=())
        self.declared.parameter_devices = ()

    def values(self) -> JobValues:  # the newest ones, without waiting
        if self._session is not None:
            self._values.update_from(self._session.board)
        return self._values

    def percentiles(self, name: str) -> tuple[int, list[float]] | None:
        """Return the number of values that instruments recorded by a name, and percentiles 5, 25, 50, 75, 95, 99.

        Also after the end of the session.  ``None`` before the agent has published them, or without the library of the
        extra ``instruments``.
        """
        self._read_percentiles()
        row = self._percentiles.get(name)
        if not isinstance(row, list) or len(row) != 7 or not all(isinstance(number, int | float) for number in row):
            return None
        return int(row[0]), row[1:]

    def _read_percentiles(self) -> None:
        if self._session is not None and (document := self._session.board.values.take_new()) is not None:
            self._percentiles = document

    @property
    def board(self) -> Board | None:
        """The agent's board, while a session runs."""
        return self._session.board if self._session is not None else None

    def warn(self, line: str) -> None:
        """Log a line through the agent, once, if a session runs."""
        if self._session is not None:
            self._session.warn(line)

    def _send_facts(self) -> None:
        if self._session is not None:
            self._session.send_facts()


def _config_with(overrides: Mapping[str, Any]) -> Config:
    """Return the environment's settings with the overrides that are not ``None``."""
    config = read_config(process_environ())
    given = {name: value for name, value in overrides.items() if value is not None}
    for variable in VARIABLES:
        if variable.field in given:
            given[variable.field] = variable.parse(given[variable.field], variable.name.lower())
    return dataclasses.replace(config, **given)
