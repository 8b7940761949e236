"""The state of a trainer's process, from /proc."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
    "Z": "dead",
}
MAX_THREADS = 2000


def state(pid: int) -> str:
    """Return the letter of a process's state, or an empty string if the process does not exist."""
    with suppress(OSError, IndexError):
        # The file is read for every heartbeat, and Path.read_bytes() takes three times as long.  The process name in
        # parentheses may be any text, also one with a parenthesis.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 4096).rpartition(b")")[2].split()[0].decode()
        finally:
            os.close(descriptor)
    return ""


def description(pid: int) -> str:
    """Return lines with the state and wait channel of a process, and with counts of its threads by state."""
    task = Path(f"/proc/{pid}")
    letter = state(pid)
    lines = [f"state: {letter} ({STATES.get(letter, 'unknown')}){_waits(task)}"]
    if kernel := _read(task / "stack"):  # readable only for root
        lines += ["kernel stack:", *(f"  {line.partition('] ')[2] or line}" for line in kernel.splitlines()[:20])]
    threads: Counter[str] = Counter()
    with suppress(OSError):
        for thread in sorted((task / "task").iterdir())[:MAX_THREADS]:
            number = int(thread.name)
            threads[f"{_read(thread / 'comm')}: {state(number)}{_waits(thread)}"] += 1
    lines += ["threads:", *(f"  {count} x {text}" for text, count in threads.most_common())]
    return "\n".join(lines)


def _waits(task: Path) -> str:
    where = _read(task / "wchan")
    return f", waits in {where}" if where not in ("", "0") else ""


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
