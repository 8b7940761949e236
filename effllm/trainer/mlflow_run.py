"""The run that the training has opened in MLflow, as facts for the sink ``mlflow``; nothing is opened or logged here.

Standard library only, without I/O: MLflow keeps the open run of a thread in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from effllm.records.plain_text import without_user


def facts_of(run: Any) -> dict[str, str | None]:
    """Return the id and the tracking URI of a run; the URI is without user and password."""
    service: Any = sys.modules.get("mlflow.tracking._tracking_service.utils")
    uri = service.get_tracking_uri() if service is not None else None
    return {
        "mlflow_run_id": str(run.info.run_id),
        "mlflow_tracking_uri": without_user(uri) if isinstance(uri, str) else None,
    }


def facts_of_open_run(sinks: Collection[str]) -> dict[str, str | None]:
    """Return the facts of the run that is open in this thread, if the sink ``mlflow`` is chosen; otherwise none."""
    fluent: Any = sys.modules.get("mlflow.tracking.fluent")
    if "mlflow" not in sinks or fluent is None:
        return {}
    try:
        run = fluent.active_run()
        return {} if run is None else facts_of(run)
    except Exception:  # noqa: BLE001 - another version of MLflow; MLFLOW_RUN_ID works without this function
        return {}
