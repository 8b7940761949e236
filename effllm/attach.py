"""The entry point that every ``import torch`` loads: where metrics are on, frameworks are hooked.

It runs in every process that imports torch, trains or not, so it looks at the environment and at little else:
agents start with the first step of a training loop.  An exception here would break ``import torch`` for everyone.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

#: Where people may ask for us by name (``report_to: efficientllm``) though nothing was sourced.
_ASKED_IN = "transformers.integrations.integration_utils"


def autoload(asked: bool = False) -> None:
    """Hook every framework that is known, now or when it is imported; torch calls this when it has been imported.

    Args:
        asked: whether the person asked for it in words, as with ``effllm run``; else the environment must.
    """
    try:
        from effllm.config.switches import (
            ATTACH,
            METRICS_ENABLED,
            is_attached,
            is_enabled,
            is_off,
            this_process,
            unclear,
        )

        switches = (METRICS_ENABLED,) if asked else (METRICS_ENABLED, ATTACH)
        if not is_off(this_process()) and (wrong := unclear(this_process(), *switches)):
            _report_wrong(wrong)
        if is_attached(this_process()) or (asked and is_enabled(this_process())):
            from effllm.hooks import attach_all

            attach_all()
        elif is_enabled(this_process()):
            _wait_for_our_name()
    except Exception as error:  # noqa: BLE001 - torch must be importable whatever is wrong with us
        _say(error)


def _report_wrong(line: str) -> None:
    """Print at the end of rank 0 that a switch is neither on nor off, unless the loop itself asks for metrics."""
    from effllm.config.place import read_place
    from effllm.config.switches import this_process
    from effllm.trainer.without_metrics import repeat_at_exit

    if read_place(this_process()).rank == 0:
        repeat_at_exit(line)


def _wait_for_our_name() -> None:
    """Let a framework know our name when it is imported; all that this costs until then is one finder of imports."""
    if _ASKED_IN in sys.modules:
        from effllm.hooks import attach_names

        attach_names()
    elif not any(isinstance(finder, _Doorbell) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Doorbell())


class _Doorbell:
    """Finds no module but `_ASKED_IN`: at its first import our hooks are registered, and their finder finds it."""

    def __init__(self) -> None:
        self._has_rung = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _ASKED_IN or self._has_rung:
            return None
        self._has_rung = True  # it stays where it is: taking it out of a list that is walked would skip another
        try:
            from effllm.hooks import attach_names
            from effllm.hooks._imports import FINDER

            attach_names()
            return FINDER.find_spec(name, path, target)
        except Exception as error:  # noqa: BLE001 - transformers must be importable whatever is wrong with us
            _say(error)
            return None


def _say(error: Any) -> None:
    with suppress(Exception):  # nothing is left to say it to
        print(f"[EfficientLLM] no metrics, training goes on: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
