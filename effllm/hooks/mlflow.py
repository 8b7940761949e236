"""MLflow: sends the id of the run that the training opens to the aggregator, whose sink ``mlflow`` writes into it.

Nothing is logged from this process, and no run is opened.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from effllm.hooks._wrap import Call, Guard, around
from effllm.trainer.lifecycle import facts_of_mlflow_run

_GUARD = Guard("MLflow's run")


def attach(module: ModuleType) -> None:
    """Hook ``mlflow.tracking.fluent``, and the copy of its function in ``mlflow``."""
    original = getattr(module, "start_run", None)
    around(module, "start_run", _GUARD, after=_record_run)
    package = sys.modules.get("mlflow")
    if original is not None and getattr(package, "start_run", None) is original:  # mlflow was imported before this hook
        package.start_run = module.start_run  # type: ignore[union-attr]
        _GUARD(_record_run, None, None, module.active_run())


def _record_run(_before: Any, _call: Call | None, run: Any) -> None:
    """Record the id and the tracking URI of a run as facts; only rank 0's facts are used."""
    if run is None:
        return
    from effllm.trainer.collector import get_metrics_collector

    get_metrics_collector().record_facts(**facts_of_mlflow_run(run))
