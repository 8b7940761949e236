"""Prints the reason for missing metrics again at the end of a process: the first line may have scrolled away."""

from __future__ import annotations

import atexit
import os
import sys

_reason = ""
_is_registered = False
_has_run = False  # whether metrics were collected, or failed to start on a rank other than 0


def suggest_at_exit(reason: str) -> None:
    """Print a reason at the end of the process, if no metrics were collected and no other reason is known."""
    if not _reason and not _has_run:
        repeat_at_exit(reason)


def repeat_at_exit(reason: str) -> None:
    """Print the reason at the end of the process; an empty reason means that metrics were collected."""
    global _reason, _is_registered, _has_run
    _reason = reason
    _has_run = _has_run or not reason
    if reason and not _is_registered:
        _is_registered = True
        atexit.register(_at_exit, os.getpid())


def _at_exit(pid: int) -> None:
    if not _reason or os.getpid() != pid or _is_no_rank():
        return
    try:
        os.write(2, f"[EfficientLLM] this job ran without metrics: {_reason}\n".encode("utf-8", "replace"))
    except OSError:  # stderr is closed
        return


def _is_no_rank() -> bool:
    """Whether this process is a launcher of ranks, or a worker of a rank, such as a data loader's."""
    process = sys.modules.get("multiprocessing.process")
    is_worker = process is not None and process.parent_process() is not None
    return is_worker or "torch.distributed.launcher" in sys.modules
