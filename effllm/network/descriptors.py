"""The limit of open files of a process: a connection is one.  Standard library alone."""

from __future__ import annotations

import contextlib
import os
import resource

_UNLIMITED = resource.RLIM_INFINITY
_OWN = 256  # that are no rank's: of sinks, ZeroMQ, connections before their handshake
_OWN_AT_LEAST = 96  # an aggregator of two ranks has 21 open
HELD_BACK = 16  # a window and its summary take six at once


def needed(peers: int) -> int:
    """Return the limit that an aggregator of so many peers needs: a fifth more, for reconnections, and its own."""
    return peers + -(-peers // 5) + min(_OWN, _OWN_AT_LEAST + peers)


def shortage(peers: int) -> str:
    """Return why our limits do not suffice for an aggregator of so many peers, or an empty string.

    They are not changed: the caller is a trainer.  The aggregator raises its own.
    """
    least = needed(peers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == _UNLIMITED or hard >= least:
        return ""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, least))
    except (ValueError, OSError):
        return _line(least, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return ""


def raise_limit(least: int = 0) -> str:
    """Raise the soft limit to the hard one, and that too where permitted; return why it does not suffice, or empty.

    Args:
        least: the number of files that are needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != _UNLIMITED and hard < least:
        with contextlib.suppress(ValueError, OSError):  # not permitted, or beyond the kernel's own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (least, least))
            return ""
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != _UNLIMITED and soft < least:
        return _line(least, soft)
    return ""


def _line(least: int, allowed: int) -> str:
    return (
        f"{least} open files are needed and {allowed} are allowed: raise the hard limit, by ulimit -Hn {least} in the "
        f"shell of root, nofile in /etc/security/limits.conf, or LimitNOFILE={least} of the systemd service"
    )


class Reserve:
    """Descriptors that are held back from connections, so that files can still be opened when those use all others."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def take(self) -> bool:
        """Hold them back; where fewer than these and one more are free, hold none and return ``False``."""
        if self._held:
            return True
        try:
            self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            while len(self._held) <= HELD_BACK:
                self._held.append(os.dup(self._held[0]))
        except OSError:
            self.release()
            return False
        os.close(self._held.pop())
        return True

    def release(self) -> None:
        while self._held:
            os.close(self._held.pop())
