"""W&B and Trackio: adds the newest values of the job to the calls of the training, if the tracker is in SINKS."""

from __future__ import annotations

from types import ModuleType

from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import process_environ
from effllm.trainer import trackers


def attach(module: ModuleType) -> None:
    """Hook the module of a tracker's runs, ``wandb.sdk.wandb_run`` or ``trackio.run``."""
    name = module.__name__.partition(".")[0]
    try:
        is_chosen = name in read_config(process_environ()).sink_options()
    except ConfigError:  # reported at the start of the metrics
        return
    if is_chosen:
        trackers.wrap(name, module)
