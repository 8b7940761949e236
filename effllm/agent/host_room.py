"""The host memory by which a process can still grow: of the machine, or of a cgroup with a limit."""

from __future__ import annotations

import re
from pathlib import Path

_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)
_GROUP = re.compile(r"^0::(/.*)$", re.MULTILINE)
_FILES = re.compile(r"^(?:inactive|active)_file (\d+)$", re.MULTILINE)


def available_bytes(pid: int, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the smallest available memory of the machine and of the cgroups of a process; ``None`` if unknown.

    The pages of files in a cgroup (version 2) count as available, because the kernel can drop them.
    """
    found = []
    if (known := _AVAILABLE.search(_text(proc / "meminfo"))) is not None:
        found.append(float(known[1]) * 1024)
    path = _GROUP.search(_text(proc / str(pid) / "cgroup"))
    group = groups / path[1].lstrip("/") if path is not None else groups
    while group.is_relative_to(groups):
        limit, current = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
        if limit.isdigit() and current.isdigit():  # "max" without a limit
            files = sum(int(size) for size in _FILES.findall(_text(group / "memory.stat")))
            found.append(float(int(limit) - int(current) + files))
        if group == groups:
            break
        group = group.parent
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
