"""How many files a process may hold open: a connection is one."""

from __future__ import annotations

import contextlib
import resource

_UNLIMITED = resource.RLIM_INFINITY


def needed(peers: int) -> int:
    """Return the limit that an aggregator of so many peers needs: a fifth more, for those that come anew."""
    return peers + -(-peers // 5) + 256


def raise_limit(least: int = 0) -> str:
    """Raise the soft limit to the hard one, and that too where we may; return what is wrong, or an empty string.

    Args:
        least: how many are needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != _UNLIMITED and hard < least:
        with contextlib.suppress(ValueError, OSError):  # not ours to raise, or beyond the kernel's own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (least, least))
            return ""
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != _UNLIMITED and soft < least:
        return (
            f"{least} open files are needed and {soft} are allowed: raise the hard limit, by ulimit -Hn {least} in the "
            f"shell of root, nofile in /etc/security/limits.conf, or LimitNOFILE={least} of the systemd service"
        )
    return ""
