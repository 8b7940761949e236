"""The limit of open files of a process; each connection takes one file.  Standard library only."""

from __future__ import annotations

import contextlib
import resource

_UNLIMITED = resource.RLIM_INFINITY
_OWN = 256  # open files for sinks, ZeroMQ, and connections before their handshake
_MIN_OWN = 96  # an aggregator of two ranks has 21 open files


def needed(peers: int) -> int:
    """Return the number of open files that an aggregator needs.

    Each peer needs one file, reconnections need a fifth more, and the aggregator has up to 256 other files.
    """
    return peers + -(-peers // 5) + min(_OWN, _MIN_OWN + peers)


def shortage(peers: int) -> str:
    """Return the remedy if this process' limits are too low for an aggregator of ``peers``, else an empty text.

    The limits stay unchanged, because the caller is a trainer.  The aggregator raises its own limits.
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
    """Raise the soft limit to the hard limit, and the hard limit if permitted.

    Return the remedy if the limit is still too low, else an empty text.

    Args:
        least: the required number of open files.
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
