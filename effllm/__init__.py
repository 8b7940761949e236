"""The efficiency ledger of an LLM training job.

Importing this imports nothing else: every name is loaded when it is first asked for (PEP 562), and what
the training process asks for needs the standard library alone.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "EfficientLLMCallback": "effllm.hooks.transformers",
    "EfficientLLMCollector": "effllm.collector",
    "EfficientLLMMetrics": "effllm.training.values",
    "MetricsCollector": "effllm.collector",
    "PerformanceMonitor": "effllm.performance_monitor",
    "PerformanceMonitorContext": "effllm.performance_monitor",
    "count": "effllm.loop",
    "finalize_efficientllm_metrics": "effllm.collector",
    "get_efficientllm_collector": "effllm.collector",
    "get_metrics_collector": "effllm.collector",
    "initialize_efficientllm_metrics": "effllm.collector",
    "monitor": "effllm.loop",
    "phase": "effllm.loop",
    "record_request": "effllm.inference",
    "request": "effllm.inference",
    "set_peer_group": "effllm.loop",
    "should_log_metrics": "effllm.collector",
    "sync_point": "effllm.loop",
}

#: Needs transformers: there by name, and not in star imports, help and dir.
_OPTIONAL = ("EfficientLLMCallback",)

__all__ = ["__version__", *sorted(set(_HOMES) - set(_OPTIONAL))]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
