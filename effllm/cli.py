"""The command line: ``effllm COMMAND``, or ``python -m effllm COMMAND``.

The commands ``env``, ``run`` and ``top`` do not import typer and rich, because this import takes a tenth of a second:
the config scripts that users source run ``env``, the process of ``run`` becomes the training process, and ``top`` shows
its first frame within 300 ms.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module

_LIGHT = ("env", "run", "top")
#: Commands that print and end: if the reader of a pipe closes it, SIGPIPE ends them silently, like other programs.
_PRINTING = ("check", "env", "inspect", "report", "runs", "compare", "fit", "explain")


def program() -> None:
    """Run the command in ``sys.argv`` as the only work of this process, and exit with its status."""
    if sys.argv[1:2] and sys.argv[1] in _PRINTING:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of the whole process
    main()


def main() -> None:
    """Run the command in ``sys.argv``, and exit with its status."""
    command, arguments = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    wants_help = arguments[:1] in (["--help"], ["-h"]) or (command == "top" and {"--help", "-h"} & {*arguments})
    if command in _LIGHT and not wants_help:
        sys.exit(import_module(f"effllm.commands.{command}").main(arguments))
    import_module("effllm.commands.app").main()
