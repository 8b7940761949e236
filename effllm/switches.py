"""The only door to the environment, and whether metrics are on: what every ``import torch`` asks.

The settings themselves are `config`'s, which takes milliseconds to import.  Standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIX = "EFFICIENTLLM_"

_ON = ("true", "1", "yes", "on")


def this_process() -> Mapping[str, str]:
    """Return the environment of this process: the only place that names ``os.environ``."""
    return os.environ


def set_default(name: str, value: str) -> None:
    """Set a variable of another library for this process, where nobody has set it."""
    os.environ.setdefault(name, value)


def is_on(text: str) -> bool:
    """Whether a switch is on: true, 1, yes or on; anything else is off."""
    return text.strip().lower() in _ON


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Say whether metrics are on; the one setting that is looked at before all others."""
    return is_on(environ.get(PREFIX + "METRICS_ENABLED", "").strip() or "true")


def is_attached(environ: Mapping[str, str]) -> bool:
    """Say whether frameworks are to be hooked as they are imported: what sourcing the config script asks for."""
    return is_on(environ.get(f"{PREFIX}ATTACH", "")) and is_enabled(environ)
