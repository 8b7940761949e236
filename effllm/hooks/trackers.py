"""W&B and Trackio: adds the newest values of the job to the calls of the training, if the tracker is in SINKS."""

from __future__ import annotations

from types import ModuleType

from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import this_process
from effllm.trainer import trackers


def attach_wandb(module: ModuleType) -> None:
    """Hook ``wandb.sdk.wandb_run``."""
    _attach("wandb", module)


def attach_trackio(module: ModuleType) -> None:
    """Hook ``trackio.run``."""
    _attach("trackio", module)


def _attach(name: str, module: ModuleType) -> None:
    try:
        is_chosen = name in read_config(this_process()).sink_options()
    except ConfigError:  # reported at the start of the metrics
        return
    if is_chosen:
        trackers.wrap(name, module)
