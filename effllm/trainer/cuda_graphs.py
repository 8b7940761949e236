"""The CUDA graphs of this process: a loop that replays a captured step runs no Python of torch, but it trains."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any


class CudaGraphs:
    """Watches the captures and the replays of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.num_captured = 0
        #: Called after a replay, with the optimizers whose steps the graph has.
        self.replayed: Callable[[Sequence[Any]], None] | None = None
        self._capturing: Any = None
        self._steps: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()

    def watch(self, graph: Any) -> None:
        """Watch a class with the methods of ``CUDAGraph``; a second call does nothing."""
        if graph is None or hasattr(graph.replay, "is_watched"):
            return
        capture, end, replay = graph.capture_begin, graph.capture_end, graph.replay

        @functools.wraps(capture)
        def capture_begin(graph: Any, *arguments: Any, **named: Any) -> Any:
            self.num_captured, self._capturing = self.num_captured + 1, graph
            return capture(graph, *arguments, **named)

        @functools.wraps(end)
        def capture_end(graph: Any, *arguments: Any, **named: Any) -> Any:
            self._capturing = None
            return end(graph, *arguments, **named)

        @functools.wraps(replay)
        def replayed(graph: Any, *arguments: Any, **named: Any) -> Any:
            result = replay(graph, *arguments, **named)
            if self.replayed is not None:
                with contextlib.suppress(Exception):  # no exception of effllm may end a training step
                    self.replayed(list(self._steps.get(graph, ())))
            return result

        replayed.is_watched = True  # type: ignore[attr-defined]
        graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replayed

    def takes_step(self, optimizer: Any) -> bool:
        """Whether an optimizer's step that has just run was only captured: each replay of this graph makes the step."""
        if self._capturing is None:
            return False
        if not sys.modules["torch"].cuda.is_current_stream_capturing():  # the capture has failed without its end
            self._capturing = None
            return False
        self._steps.setdefault(self._capturing, weakref.WeakSet()).add(optimizer)
        return True


GRAPHS = CudaGraphs()
