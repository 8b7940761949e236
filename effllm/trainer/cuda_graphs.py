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
        self.num_captured = 0  #: number of captures that have begun
        #: Called after a replay, with the optimizers whose steps the graph has.
        self.on_replay: Callable[[Sequence[Any]], None] | None = None
        self._capturing: Any = None  # the graph that is being captured
        self._optimizers_by_graph: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()

    def watch_class(self, graph_class: Any) -> None:
        """Wrap the methods of the class ``CUDAGraph``; a second call does nothing, and so does ``None``."""
        if graph_class is None or hasattr(graph_class.replay, "is_watched"):
            return
        capture, end, replay = graph_class.capture_begin, graph_class.capture_end, graph_class.replay

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
            if self.on_replay is not None:
                with contextlib.suppress(Exception):  # no exception of effllm may end a training step
                    self.on_replay(list(self._optimizers_by_graph.get(graph, ())))
            return result

        replayed.is_watched = True  # type: ignore[attr-defined]
        graph_class.capture_begin, graph_class.capture_end, graph_class.replay = capture_begin, capture_end, replayed

    def keep_if_captured(self, optimizer: Any) -> bool:
        """Return whether a step was captured, and so not run; its optimizer is kept, and each replay makes the step."""
        if self._capturing is None:
            return False
        if not sys.modules["torch"].cuda.is_current_stream_capturing():  # the capture has failed without its end
            self._capturing = None
            return False
        self._optimizers_by_graph.setdefault(self._capturing, weakref.WeakSet()).add(optimizer)
        return True


GRAPHS = CudaGraphs()
