"""The entry point that every ``import torch`` loads; it hooks frameworks if metrics are enabled.

The entry point also runs in processes that import torch but do not train, so it reads little more than the environment.
Agents start with the first step of a training loop.  An exception here would break every ``import torch``.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

#: Module with the setting ``report_to: efficientllm``, which enables metrics without an environment variable.
_REPORT_TO_MODULE = "transformers.integrations.integration_utils"


def autoload(is_run_command: bool = False) -> None:
    """Hook every imported framework now, and every other framework at its import. Torch calls this function last.

    Args:
        is_run_command: True in ``effllm run``, which hooks unless metrics are off; else the switch ATTACH decides.
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

        switches = (METRICS_ENABLED,) if is_run_command else (METRICS_ENABLED, ATTACH)
        if not is_off(process_environ()) and (switch_error := invalid_switch_error(process_environ(), *switches)):
            _report_switch_error(switch_error)
        if is_attached(process_environ()) or (is_run_command and is_enabled(process_environ())):
            from effllm.hooks import attach_all

            attach_all()
        elif is_enabled(process_environ()):
            _register_report_to_name()
    except Exception as error:  # noqa: BLE001 - torch must be importable despite any error in effllm
        _print_error(error)


def _report_switch_error(line: str) -> None:
    """Print the error of a switch when rank 0 exits, unless the training loop starts metrics."""
    from effllm.config.place import read_place
    from effllm.config.switches import process_environ
    from effllm.trainer.without_metrics import repeat_at_exit

    if read_place(process_environ()).rank == 0:
        repeat_at_exit(line)


def _register_report_to_name() -> None:
    """Register the name ``efficientllm`` now, or, with an import finder, when transformers is imported."""
    if _REPORT_TO_MODULE in sys.modules:
        from effllm.hooks import attach_names

        attach_names()
    elif not any(isinstance(finder, _NameFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NameFinder())


class _NameFinder:
    """Registers the name at the first import of `_REPORT_TO_MODULE`, and passes this import to the hooks' finder."""

    def __init__(self) -> None:
        self._has_registered = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _REPORT_TO_MODULE or self._has_registered:
            return None
        self._has_registered = True  # a removal of this finder here would make the import system skip the next finder
        try:
            from effllm.hooks import attach_names
            from effllm.hooks._imports import FINDER

            attach_names()
            return FINDER.find_spec(name, path, target)
        except Exception as error:  # noqa: BLE001 - transformers must be importable despite any error in effllm
            _print_error(error)
            return None


def _print_error(error: Any) -> None:
    with suppress(Exception):  # stderr may be closed
        print(f"[EfficientLLM] no metrics, training goes on: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
