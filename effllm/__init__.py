"""Shows how well a training job uses its GPUs, across all ranks and nodes.

The import of this package imports nothing else: every name is loaded at its first use (PEP 562). The names for
the training process need only the standard library.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_HOMES = {  # public name -> module that defines it
    "EfficientLLMCallback": "effllm.hooks.transformers",
    "EfficientLLMCollector": "effllm.trainer.collector",
    "EfficientLLMMetrics": "effllm.trainer.values",
    "MetricsCollector": "effllm.trainer.collector",
    "PerformanceMonitor": "effllm.instruments.performance_monitor",
    "PerformanceMonitorContext": "effllm.instruments.performance_monitor",
    "count": "effllm.trainer.loop",
    "finalize_efficientllm_metrics": "effllm.trainer.collector",
    "get_efficientllm_collector": "effllm.trainer.collector",
    "get_metrics_collector": "effllm.trainer.collector",
    "initialize_efficientllm_metrics": "effllm.trainer.collector",
    "load": "effllm.analysis.load",
    "monitor": "effllm.trainer.loop",
    "phase": "effllm.trainer.loop",
    "record_request": "effllm.trainer.inference",
    "request": "effllm.trainer.inference",
    "set_peer_group": "effllm.trainer.loop",
    "should_log_metrics": "effllm.trainer.collector",
    "sync_point": "effllm.trainer.loop",
}

#: Needs transformers, so star imports, help() and dir() omit this name; an import by name works.
_OPTIONAL = ("EfficientLLMCallback",)

__all__ = ["__version__", *sorted(set(_HOMES) - set(_OPTIONAL))]


def __getattr__(name: str) -> Any:
    module = _HOMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
