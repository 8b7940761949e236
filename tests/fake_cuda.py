"""A stand-in for torch with several GPUs: contexts, a current device per thread, events and an allocator per GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

UUIDS = tuple(f"{number:08x}-0000-0000-0000-000000000000" for number in range(8))


class FakeTorch:
    """The module; ``cuda`` is a `FakeCuda`."""

    def __init__(self, gpus=1, contexts=(0,)):
        self.cuda = cuda = FakeCuda(gpus, contexts)
        self.version = SimpleNamespace(cuda="13.0", hip=None)
        self._C = SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index in cuda.contexts)


class FakeCuda:
    """``torch.cuda``; the test sets the clock and the progress of the GPUs.

    As in CUDA, an event belongs to the GPU on which it was recorded first, and a record or an allocation makes a
    context. Calls that would wait or change the script's choices raise.
    """

    def __init__(self, gpus=1, contexts=(0,)):
        self.contexts = set(contexts)
        self.is_there, self.captured, self.fails = True, set(), False
        self.now_ms, self.done_ms = 0.0, float("inf")  # events before done_ms are complete
        self.made, self.used = 0, dict.fromkeys(range(gpus), 0)
        self.waits, self.may_wait = 0, False  # calls of an event's synchronize, which a test allows
        self._here = threading.local()
        self.Event = lambda enable_timing: FakeEvent(self, enable_timing)

    def is_initialized(self):
        return self.is_there

    is_available = is_initialized

    def device_count(self):
        return len(self.used)

    def current_device(self):
        assert self.is_there, "this call would start CUDA"
        return getattr(self._here, "index", 0)

    def set_device(self, index):
        self._here.index = index

    def current_stream(self, index):
        return index

    def device(self, index):
        return _Selected(self, index)

    def is_current_stream_capturing(self):
        return self.current_device() in self.captured

    def get_device_properties(self, index):
        return SimpleNamespace(uuid=UUIDS[index], pci_domain_id=0, pci_bus_id=16 + index, pci_device_id=0)

    def allocate(self, index, size):
        """Allocate memory, as ``model.to`` does."""
        self.contexts.add(index)
        self.used[index] += size

    def memory_allocated(self, index):
        assert index in self.contexts, "this call is only for GPUs with a context"
        return self.used[index]

    def memory_stats_as_nested_dict(self):
        known = {"all": {"current": self.used[self.current_device()], "peak": self.used[self.current_device()]}}
        return {
            "allocated_bytes": known, "reserved_bytes": known, "inactive_split_bytes": known,
            "num_alloc_retries": 0, "num_ooms": 0,
        }  # fmt: skip

    def synchronize(self):
        raise AssertionError("this call waits for the device")


class FakeEvent:
    def __init__(self, cuda, enable_timing):
        assert enable_timing
        self._cuda, self._index, self.at_ms = cuda, None, None
        cuda.made += 1

    def record(self, stream=None):
        cuda, index = self._cuda, self._cuda.current_device() if stream is None else stream
        if cuda.fails:
            raise RuntimeError("an illegal memory access was encountered")
        assert self._index in (None, index), "the event belongs to another GPU"
        assert index in cuda.contexts, "this call would make a context"
        self._index, self.at_ms = index, cuda.now_ms

    def query(self):
        return self.at_ms <= self._cuda.done_ms

    def elapsed_time(self, end):
        assert end.query(), "this call would wait"
        assert end._index == self._index
        return end.at_ms - self.at_ms

    def synchronize(self):
        assert self._cuda.may_wait, "this call waits for the device"
        self._cuda.waits, self._cuda.done_ms = self._cuda.waits + 1, max(self._cuda.done_ms, self.at_ms)


class _Selected:
    def __init__(self, cuda, index):
        self._cuda, self._index = cuda, index

    def __enter__(self):
        assert self._index in self._cuda.contexts, "this call would make a context"
        self._before = self._cuda.current_device()
        self._cuda.set_device(self._index)

    def __exit__(self, *_):
        self._cuda.set_device(self._before)
