"""Instruments that a training script calls itself: memory, timers, throughput, metrics of training, energy.

The instruments run in the training process. They use only the standard library and the torch that the script has
imported, start no thread, and do not wait.
"""

from __future__ import annotations

from typing import Any

_HOMES = {  # public name -> module, which is imported at the first use
    "EnergyMetrics": "effllm.instruments.energy",
    "EnergyTrackingCallback": "effllm.hooks.energy_callback",  # needs transformers
    "RobustGPUMonitor": "effllm.instruments.energy",
}


def __getattr__(name: str) -> Any:
    module = _HOMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value
