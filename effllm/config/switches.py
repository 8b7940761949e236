"""The only access to the environment, and the switches that are read at every ``import torch``.

The other settings are in `settings`, which takes milliseconds to import.  Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIX = "EFFICIENTLLM_"

METRICS_ENABLED = f"{PREFIX}METRICS_ENABLED"
ATTACH = f"{PREFIX}ATTACH"

ALLOWED = "true, 1, yes or on, or false, 0, no or off"
_ON = ("true", "1", "yes", "on")
_OFF = ("false", "0", "no", "off")


def process_environ() -> Mapping[str, str]:
    """Return the environment of this process; no other code reads ``os.environ``."""
    return os.environ


def set_default(name: str, value: str) -> None:
    """Set a variable of another library for this process, unless it is set."""
    os.environ.setdefault(name, value)


def is_on(text: str) -> bool:
    """Whether a switch is on: true, 1, yes or on."""
    return text.strip().lower() in _ON


def is_invalid_switch(text: str) -> bool:
    """Whether the text of a switch is invalid; a valid text means on or off, or is empty."""
    return text.strip().lower() not in (*_ON, *_OFF, "")


def invalid_switch_error(environ: Mapping[str, str], *names: str) -> str:
    """Return an error text for the first switch with an invalid value, or an empty string."""
    for name in names:
        if is_invalid_switch(text := environ.get(name, "")):
            return f"{name}={text!r} is not usable: must be {ALLOWED}"
    return ""


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Whether metrics are on, which is the default."""
    return is_on(environ.get(METRICS_ENABLED, "").strip() or "true")


def is_off(environ: Mapping[str, str]) -> bool:
    """Whether metrics are off; ``False`` for an invalid value, for which `read_config` raises an error."""
    return not is_enabled(environ) and not is_invalid_switch(environ.get(METRICS_ENABLED, ""))


def is_attached(environ: Mapping[str, str]) -> bool:
    """Whether frameworks are hooked at their import; the config scripts set this switch."""
    return is_on(environ.get(ATTACH, "")) and is_enabled(environ)
