"""Kills the aggregator of the nth start at the nth call that changes a file of its run folder.

Python imports this file at its start if the folder is on PYTHONPATH. ``DYING_IN`` is a folder; each start adds a file.
"""

import os
import signal
import stat
import sys
from pathlib import Path

LIVES = 16  # later aggregators are not killed


def dying(call, left):
    """Return ``call`` with a countdown: call number ``left`` kills the process; a write first writes half of its
    data."""

    def counted(first, *rest, **keywords):
        if isinstance(first, int) and not stat.S_ISREG(os.fstat(first).st_mode):
            return call(first, *rest, **keywords)
        left[0] -= 1
        if not left[0]:
            if call.__name__ == "write":
                call(first, rest[0][: len(rest[0]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(first, *rest, **keywords)

    return counted


if "effllm.server.process" in " ".join(sys.orig_argv):
    folder = Path(os.environ["DYING_IN"])
    life = len(list(folder.iterdir())) + 1
    (folder / str(life)).touch()
    if life <= LIVES:
        countdown = [life]
        for name in ("write", "ftruncate", "replace"):
            setattr(os, name, dying(getattr(os, name), countdown))
