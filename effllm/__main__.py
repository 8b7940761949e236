"""``python -m effllm`` is ``effllm``, with the interpreter that trains."""

from __future__ import annotations

from effllm.cli import main

if __name__ == "__main__":
    main()
