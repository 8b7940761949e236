"""A queue from other threads to the loop."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A queue for pollers: its descriptor is readable while the queue has items."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Add an item; any thread may call this."""
        self._items.put(item)
        os.eventfd_write(self.descriptor, 1)

    def take(self) -> Iterator[Item]:
        """Yield the items, oldest first, until the queue is empty."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._items.get_nowait()
