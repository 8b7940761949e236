"""W&B, Trackio and MLflow, whose runs the training opens; no run is opened here, and no call is added."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import process_environ
from effllm.hooks._wrap import Call, Guard, around
from effllm.trainer import trackers

_MLFLOW_GUARD = Guard("MLflow's run")


def attach(module: ModuleType) -> None:
    """Add the job's newest values to the calls of ``wandb.sdk.wandb_run`` or ``trackio.run``, if it is in SINKS."""
    name = module.__name__.partition(".")[0]
    try:
        is_chosen = name in read_config(process_environ()).sink_options()
    except ConfigError:  # reported at the start of the metrics
        return
    if is_chosen:
        trackers.wrap(name, module)


def attach_mlflow(module: ModuleType) -> None:
    """Hook ``mlflow.tracking.fluent``, and the copy of its function in ``mlflow``; the sink writes into the run."""
    original = getattr(module, "start_run", None)
    around(module, "start_run", _MLFLOW_GUARD, after=_record_run)
    package = sys.modules.get("mlflow")
    if original is not None and getattr(package, "start_run", None) is original:  # mlflow was imported before this hook
        package.start_run = module.start_run  # type: ignore[union-attr]
        _MLFLOW_GUARD(_record_run, None, None, module.active_run())


def _record_run(_before: Any, _call: Call | None, run: Any) -> None:
    """Record the id and the tracking URI of a run as facts; only rank 0's facts are used."""
    if run is None:
        return
    from effllm.trainer.collector import get_metrics_collector
    from effllm.trainer.lifecycle import facts_of_mlflow_run

    get_metrics_collector().record_facts(**facts_of_mlflow_run(run))
