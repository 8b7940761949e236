"""The names of the energy in the trackers of a Hugging Face Trainer: ``energy_step/...``, without ``train/``."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

_PREFIX = "train/"
_PREFIXED_GROUPS = tuple(f"{_PREFIX}{group}/" for group in ("energy_step", "energy_interval", "final_energy"))
_MARK = "__effllm_keeps_energy_keys__"  # attribute of the wrapper


def wrap_rewrite_logs(module: ModuleType) -> None:
    """Wrap ``rewrite_logs`` of ``transformers.integrations.integration_utils``, once; other keys are unchanged.

    The Trainer's callbacks for W&B, TensorBoard and other trackers pass their logs through this function, which puts
    ``train/`` before each key.
    """
    original: Any = getattr(module, "rewrite_logs", None)
    if not callable(original) or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def rewrite_logs(*args: Any, **kwargs: Any) -> Any:
        return _without_train_prefix(original(*args, **kwargs))

    setattr(rewrite_logs, _MARK, True)
    module.rewrite_logs = rewrite_logs  # type: ignore[attr-defined]


def _without_train_prefix(logs: Any) -> Any:
    if not isinstance(logs, dict):
        return logs
    return {
        key.removeprefix(_PREFIX) if isinstance(key, str) and key.startswith(_PREFIXED_GROUPS) else key: value
        for key, value in logs.items()
    }
