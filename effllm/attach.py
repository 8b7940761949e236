"""The entry point that every ``import torch`` loads: where metrics are on, frameworks are hooked.

It runs in every process that imports torch, trains or not, so it looks at the environment and at little else:
agents start with the first step of a training loop.  An exception here would break ``import torch`` for everyone.
"""

from __future__ import annotations

from typing import Any


def autoload(asked: bool = False) -> None:
    """Hook every framework that is known, now or when it is imported; torch calls this when it has been imported.

    Args:
        asked: whether the person asked for it in words, as with ``effllm run``; else the environment must.
    """
    try:
        from effllm.switches import is_attached, is_enabled, this_process

        if is_attached(this_process()) or (asked and is_enabled(this_process())):
            from effllm.hooks import attach_all

            attach_all()
        elif is_enabled(this_process()):
            from effllm.hooks import attach_names

            attach_names()
    except Exception as error:  # noqa: BLE001 - torch must be importable whatever is wrong with us
        _say(error)


def _say(error: Any) -> None:
    try:
        import sys

        print(f"[EfficientLLM] no metrics, training goes on: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
    except Exception:  # noqa: BLE001, S110 - nothing is left to say it to
        pass
