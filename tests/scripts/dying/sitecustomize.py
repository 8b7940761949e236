"""Ends the nth start of an aggregator in the nth call that changes a file of its run folder.

Python imports this at its start where this folder is on PYTHONPATH; ``DYING_IN`` is a folder with a file
for each start.
"""

import os
import signal
import stat
import sys
from pathlib import Path

LIVES = 16  # later aggregators are not ended


def dying(call, left):
    """Return the call with a count: the ``left``th call writes one half or does not run, and kills the process."""

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
