"""The command line as ``python -m effllm``: the same as ``effllm``, with the interpreter of the training."""

from __future__ import annotations

from effllm.cli import main

if __name__ == "__main__":
    main()
