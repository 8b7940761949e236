"""Lets megatron-core train without a GPU, by replacements of its CUDA calls.

The schedules, gradient buffers and optimizer of megatron-core call CUDA explicitly.  No file of megatron-core changes.
Instead, some functions of torch are replaced, and a torch function mode replaces device arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaMeansCpu(TorchFunctionMode):
    """Lets every torch call with a CUDA device use the CPU, and lets CPU tensors report a CUDA type."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``function`` with the CPU instead of CUDA devices."""
        named = {name: _on_cpu(name, value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **named)
        # The optimizer sorts parameters by type name, and accepts only names that begin with torch.cuda.
        is_type_name = function is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.", 1) if is_type_name else result


def _on_cpu(name: str, value: Any) -> Any:
    if name == "device" and (isinstance(value, int) or str(value).startswith("cuda")):
        return "cpu"
    return False if name == "pin_memory" else value


class IdleStream:
    """The stream of a machine without CUDA, on which all work is already complete."""

    cuda_stream = 0

    def wait_stream(self, stream: object) -> None:
        """Wait for nothing."""

    def wait_event(self, event: object) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""


# One function for each replaced name: torch's compiler distinguishes torch functions by identity, and fails if
# two names have the same object.


def _current_device() -> torch.device:
    return torch.device("cpu")


def _synchronize(*_: object, **_options: object) -> None:
    pass


def _manual_seed(_seed: int) -> None:
    pass


def _get_rng_state(*_: object, **_options: object) -> torch.Tensor:
    return torch.get_rng_state()


def _get_rng_state_again(*_: object, **_options: object) -> torch.Tensor:
    return torch.get_rng_state()


def _current_stream(*_: object, **_options: object) -> IdleStream:
    return IdleStream()


def _set_rng_state(state: torch.Tensor, *_: object, **_options: object) -> None:
    torch.set_rng_state(state)


def train_on_cpu() -> None:
    """Replace the CUDA calls, for the rest of this process."""
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = _current_device
    torch.cuda.synchronize = _synchronize
    torch.cuda.manual_seed = _manual_seed
    torch.cuda.get_rng_state = _get_rng_state
    torch.cuda.random.get_rng_state = _get_rng_state_again
    torch.cuda.current_stream = _current_stream
    random._set_cuda_rng_state = _set_rng_state
    CudaMeansCpu().__enter__()
