"""The original's module name: replacing the package name in an import is the whole port."""

from __future__ import annotations

from typing import Any

import effllm

__all__ = [name for name in effllm.__all__ if name != "__version__"]


def __getattr__(name: str) -> Any:
    if name not in (*__all__, "EfficientLLMCallback"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(effllm, name)


def __dir__() -> list[str]:
    return list(__all__)
