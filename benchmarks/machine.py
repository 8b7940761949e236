"""The date, commit and machine of a results file."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from typing import Any


def machine(**more: Any) -> dict[str, Any]:
    """Return date, commit, machine and the given facts, without names that identify the machine's owner."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        **more,
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()
