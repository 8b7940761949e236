"""What a reader of the run folder needs to know about where the numbers come from."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "megatron-core", "transformers", "trl", "lightning", "nvidia-ml-py", "pyzmq", "msgspec")


def gather(folder: Path) -> dict[str, Any]:
    """Return host, versions and the commit of the code in ``folder``; what cannot be known is left out."""
    facts: dict[str, Any] = {
        "aggregator_host": platform.node(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "packages": _versions(),
    }
    commit = _git(folder, "rev-parse", "HEAD")
    if commit:
        facts["git_commit"] = commit
        facts["git_dirty"] = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    return facts


def boot_id() -> str:
    """Return what tells this boot of this machine, and so its monotonic clock, from all others; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=2.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
