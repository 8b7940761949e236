"""The command line as ``python -m effllm``: the same as ``effllm``, with the interpreter of the training."""

from __future__ import annotations

from effllm.cli import program

if __name__ == "__main__":
    program()
