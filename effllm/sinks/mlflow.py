"""MLflow: every window, written by a client into the run that the training has opened; no run is ever created.

The library is imported when the sink is opened, because the import takes seconds and 100 MB.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from effllm.config.setting_values import number
from effllm.config.switches import process_environ, set_default
from effllm.metrics.output_names import chart_tag, has_chart
from effllm.records.board import DOUBTFUL, TRACKED
from effllm.records.forecast import foretold_values
from effllm.records.job import ClusterReport
from effllm.records.plain_text import without_user
from effllm.sinks import FirstFailure, Option, RunInfo

OPTIONS = {
    "every": Option("5", number(0, unit="seconds"), "Minimum time between two calls of the server, in seconds."),
}

RUN_ID, TRACKING_URI = "mlflow_run_id", "mlflow_tracking_uri"  # facts from the training process
#: Variables of MLflow in this process, unless the user has set them.
DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # stderr belongs to the job
}
MAX_IN_CALL = 1000  # MLflow's limit of metrics in one call
MAX_WAITING = 20_000  # maximum number of values that wait for a run; afterwards the oldest are dropped
NO_RUN_S = 60.0  # time without a run after which one line reports this
NO_RUN = (
    "sink mlflow: no run of MLflow was opened on rank 0, so nothing is written; set MLFLOW_RUN_ID, or call "
    "mlflow.start_run() on rank 0"
)


def open_sink(run: RunInfo) -> Mlflow:
    """Import MLflow; nothing is read or written before the run of the training is known."""
    for name, value in DEFAULTS.items():
        set_default(name, value)
    for name in ("mlflow", "urllib3", "alembic"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    from mlflow.entities import Metric
    from mlflow.tracking.client import MlflowClient

    return Mlflow(run, MlflowClient, Metric)


class Mlflow:
    """Writes the values of each window at the framework's iteration, in one call for several windows.

    ``connect`` returns a client for a tracking URI; ``None`` is MLflow's default.  ``make_metric`` returns a metric
    from key, value, time in ms and step.
    """

    def __init__(self, run: RunInfo, connect: Callable[[str | None], Any], make_metric: Callable[..., Any]) -> None:
        self._run, self._connect, self._make_metric = run, connect, make_metric
        self._first_failure = FirstFailure()
        self._client: Any = None
        self._run_id = ""
        self._waiting_values: list[Any] = []  # metrics of MLflow, oldest first
        self._num_waiting_windows = 0  # in `_waiting_values`, besides the window that is being written
        self._opened_s = self._sent_s = time.monotonic()  # times of the start and of the last call of the server
        self._has_warned_of_no_run = False

    def write(self, report: ClusterReport) -> None:
        """Keep the values of a window, and write all kept values if a call is due.

        Raises:
            WriteFailed: the server could not be reached, or has rejected the values; these values are lost.
        """
        values = {chart_tag(tag): value for tag, value in report.values.items() if has_chart(tag)}
        for tag, value in foretold_values(report.forecast, "forecast/").items():
            key, factor = TRACKED[tag]
            values[key] = value * factor
        if report.loss is not None:
            values[chart_tag("training/loss")] = report.loss
        if report.doubtful:
            values[TRACKED[DOUBTFUL][0]] = len(report.doubtful)
        time_ms = int(report.time_s * 1000)
        self._waiting_values += [
            self._make_metric(key, value, time_ms, report.iteration)
            for key, value in values.items()
            if math.isfinite(value)
        ]
        del self._waiting_values[:-MAX_WAITING]
        if report.final or time.monotonic() - self._sent_s >= self._run.options["every"]:
            self._send()
        self._num_waiting_windows += bool(self._waiting_values)

    def close(self) -> None:
        """Write the kept values; report it if there was no run. May be called twice."""
        self._send()
        if self._waiting_values:
            self._warn_of_no_run()

    def _send(self) -> None:
        if not self._waiting_values or not self._connect_to_run():
            return
        self._sent_s = time.monotonic()
        waiting, self._waiting_values = self._waiting_values, []
        num_windows, self._num_waiting_windows = self._num_waiting_windows, 0
        try:
            for first in range(0, len(waiting), MAX_IN_CALL):
                self._client.log_batch(self._run_id, metrics=waiting[first : first + MAX_IN_CALL])
        except Exception as error:
            raise self._first_failure.error_of(f"{type(error).__name__}: {error}", num_windows) from error
        self._first_failure.note_success()

    def _connect_to_run(self) -> bool:
        """Connect once to the run that the training has opened; return whether this run is known."""
        if not self._run_id:
            environ = process_environ()
            self._run_id = str(self._run.fact(RUN_ID) or environ.get("MLFLOW_RUN_ID") or "")
            if self._run_id:
                self._client = self._connect(_tracking_uri(self._run.fact(TRACKING_URI), environ))
            elif time.monotonic() - self._opened_s > NO_RUN_S:
                self._warn_of_no_run()
        return bool(self._run_id)

    def _warn_of_no_run(self) -> None:
        if not self._has_warned_of_no_run:
            self._has_warned_of_no_run = True
            self._run.log(NO_RUN)


def _tracking_uri(of_training: Any, environ: Mapping[str, str]) -> str | None:
    """Return the training's tracking URI; that of the environment if it is the same with a user, or the only one."""
    uri = environ.get("MLFLOW_TRACKING_URI")
    if not isinstance(of_training, str) or (uri and without_user(uri) == of_training):
        return uri
    return of_training
