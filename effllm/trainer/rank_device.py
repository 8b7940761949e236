"""The GPUs that a training process uses; finding them starts no CUDA and makes no context.

CUDA's current device means little: a script with ``model.to("cuda:3")`` and no ``set_device`` has current device 0,
and ``torch.load`` or ``empty_cache`` may leave a context, some hundred MB, on GPU 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from effllm.trainer.declared import Declared

_T = TypeVar("_T")


class RankDevice:
    """Finds the GPUs of this process, again and again until an optimizer has shown where its parameters are.

    In this order: the GPUs of the parameters; the only GPU with a CUDA context; a GPU that the script has set.  Without
    any of these, the agent takes the visible GPU with the number of the local rank, or none if several have a context.
    """

    def __init__(self, torch: Any, declared: Declared) -> None:
        self._cuda, self._declared = torch.cuda, declared
        self._has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # of a GPU, in this process
        self.index: int | None = None  #: the GPU on which this process may record events; ``None``: none yet
        self.is_due = True  #: whether to find the GPUs at the start of the next iteration
        self._last_state: Any = None  # the GPUs at the last search; without any, the number of contexts
        declared.on_devices_change = self._request_find

    def _request_find(self) -> None:
        self.is_due = True

    def end_window(self) -> None:
        """Find the GPUs again at the next iteration, unless parameters have shown them."""
        self._declared.num_windows += 1
        self.is_due = not self._declared.parameter_devices

    def find_gpus(self) -> bool:
        """Find the GPUs, and declare their facts; return whether they have changed."""
        cuda = self._cuda
        if not getattr(cuda, "is_initialized", lambda: False)():
            return False
        contexts = [gpu for gpu in range(cuda.device_count()) if self._has_context is None or self._has_context(gpu)]
        facts = self._declared.facts
        stated = facts.gpus if facts.serves_requests else ()  # by the hook or program that answers requests
        used = self._declared.parameter_devices or stated or self._gpus_in_use(contexts)
        self.index = used[0] if used and used[0] in contexts else None
        state = used, len(contexts) if not used else 0
        if state == self._last_state:
            return False
        self._last_state = state
        self._declared.set(**self._device_facts(used, contexts))
        return True

    def call_on_gpu(self, act: Callable[[], _T]) -> _T | None:
        """Call a function while the rank's GPU is CUDA's current device.

        ``None`` without a known GPU, because an event makes a context, and during a capture: an event would become a
        part of the graph, and a query would end the capture.
        """
        if self.index is None:
            return None
        cuda = self._cuda
        if cuda.current_device() == self.index:
            return None if cuda.is_current_stream_capturing() else act()
        with cuda.device(self.index):
            return None if cuda.is_current_stream_capturing() else act()

    def _gpus_in_use(self, contexts: list[int]) -> tuple[int, ...]:
        current = int(self._cuda.current_device())
        if self._has_context is None or (not contexts and current):
            return (current,)
        return tuple(contexts) if len(contexts) == 1 else ()

    def _device_facts(self, used: tuple[int, ...], contexts: list[int]) -> dict[str, Any]:
        facts: dict[str, Any] = {"cuda_index": None, "cuda_uuid": "", "cuda_pci_bus_id": "", "unclear_gpu": ""}
        facts["visible_gpus"] = self._cuda.device_count()
        if not used:
            if len(contexts) > 1:
                named = ", ".join(map(str, contexts))
                facts["unclear_gpu"] = (
                    f"this process has CUDA contexts on the GPUs {named}, and which of them trains is not known before "
                    "an optimizer of torch steps"
                )
            return facts
        stated = self._declared.facts.gpus if self._declared.facts.serves_requests else ()
        facts["gpus"] = used if len(used) > 1 else stated
        properties = self._cuda.get_device_properties(used[0])
        parts: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        if None not in parts:
            facts["cuda_pci_bus_id"] = f"{parts[0]:08X}:{parts[1]:02X}:{parts[2]:02X}.0"
        return {**facts, "cuda_index": used[0], "cuda_uuid": str(getattr(properties, "uuid", ""))}
