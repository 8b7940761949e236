"""The module name of the original EfficientLLM: to port a script, replace the package name in its import."""

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
