"""The entry point that every ``import torch`` loads; it hooks frameworks if metrics are enabled.

The entry point also runs in processes that import torch but do not train, so it reads little more than the environment.
Agents start with the first step of a training loop.  An exception here would break every ``import torch``.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

#: Module with the setting ``report_to: efficientllm``, which enables metrics without an environment variable.
_NAMED_IN = "transformers.integrations.integration_utils"


def autoload(asked: bool = False) -> None:
    """Hook every imported framework now, and every other framework at its import. Torch calls this function last.

    Args:
        asked: True for ``effllm run``; False if the environment decides.
    """
    try:
        from effllm.config.switches import (
            ATTACH,
            METRICS_ENABLED,
            invalid_switch_error,
            is_attached,
            is_enabled,
            is_off,
            process_environ,
        )

        switches = (METRICS_ENABLED,) if asked else (METRICS_ENABLED, ATTACH)
        if not is_off(process_environ()) and (wrong := invalid_switch_error(process_environ(), *switches)):
            _report_wrong(wrong)
        if is_attached(process_environ()) or (asked and is_enabled(process_environ())):
            from effllm.hooks import attach_all

            attach_all()
        elif is_enabled(process_environ()):
            _register_name()
    except Exception as error:  # noqa: BLE001 - torch must be importable despite any error in effllm
        _say(error)


def _report_wrong(line: str) -> None:
    """Print at the end of rank 0 that a switch has an invalid value, unless the training loop starts metrics."""
    from effllm.config.place import read_place
    from effllm.config.switches import process_environ
    from effllm.trainer.without_metrics import repeat_at_exit

    if read_place(process_environ()).rank == 0:
        repeat_at_exit(line)


def _register_name() -> None:
    """Register effllm's name when transformers is imported; until that import, only one import finder is added."""
    if _NAMED_IN in sys.modules:
        from effllm.hooks import attach_names

        attach_names()
    elif not any(isinstance(finder, _NameFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NameFinder())


class _NameFinder:
    """Registers effllm's name at the first import of `_NAMED_IN`, and passes this import to the finder of the hooks."""

    def __init__(self) -> None:
        self._has_registered = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _NAMED_IN or self._has_registered:
            return None
        self._has_registered = True  # a removal of this finder here would make the import system skip the next finder
        try:
            from effllm.hooks import attach_names
            from effllm.hooks._imports import FINDER

            attach_names()
            return FINDER.find_spec(name, path, target)
        except Exception as error:  # noqa: BLE001 - transformers must be importable despite any error in effllm
            _say(error)
            return None


def _say(error: Any) -> None:
    with suppress(Exception):  # stderr may be closed
        print(f"[EfficientLLM] no metrics, training goes on: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
