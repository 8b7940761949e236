"""The command line: ``effllm COMMAND``, or ``python -m effllm COMMAND``.

The commands ``env`` and ``run`` do not import typer and rich, because this import takes a tenth of a second: the config
scripts that users source run ``env``, and the process of ``run`` becomes the training process.
"""

from __future__ import annotations

import sys
from importlib import import_module

_LIGHT = ("env", "run")


def main() -> None:
    """Run the command in ``sys.argv``, and exit with its status."""
    command, arguments = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    if command in _LIGHT and arguments[:1] not in (["--help"], ["-h"]):
        sys.exit(import_module(f"effllm.commands.{command}").main(arguments))
    import_module("effllm.commands.app").main()
