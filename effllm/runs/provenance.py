"""What a reader of the run folder needs to know about where the numbers come from."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_SECRET = re.compile(r"(?i)(key|token(?!iz|s)|secret|password|passwd|credential)")
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


def without_secrets(command: list[str]) -> list[str]:
    """Return a command line with the values of arguments named like secrets left out.

    Words such as ``--tokenizer`` and ``--max-tokens`` are no secrets.

    >>> without_secrets(["train.py", "--lr", "1", "--api-key", "abc", "--hf_token=x"])
    ['train.py', '--lr', '1', '--api-key', '***', '--hf_token=***']
    """
    shown: list[str] = []
    hide_next = False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            shown.append("***")
        elif equals and _SECRET.search(name):
            shown.append(f"{name}=***")
        else:
            shown.append(word)
        hide_next = not equals and word.startswith("-") and bool(_SECRET.search(word))
    return shown


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
