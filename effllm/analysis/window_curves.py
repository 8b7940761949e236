"""The curves of a run: values of metrics and distributions over its windows, read in one pass with bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from effllm.analysis.curve import Curve
from effllm.records.job import Spread
from effllm.store.reader import JsonLines, segments

#: Tag of the loss; ``spread/NAME/FIELD`` is the tag of a field of a distribution.
LOSS = "loss"


Iteration = Annotated[int, Meta(ge=-(2**53), le=2**53)]  # exact as a float


class CurveLine(Struct, frozen=True):
    """The used fields of a line of windows-*.jsonl."""

    attempt: int = 0
    iteration: Iteration | None = None
    iteration_first: Iteration = 0
    iteration_last: Iteration = 0
    loss: float | None = None
    correction: bool = False
    simulated: bool = False
    values: dict[str, float] = {}
    spread: dict[str, Spread] = {}


class WindowCurves:
    """The curves of a run over its iterations, by tag, with the number of windows and of lines that cannot be read."""

    def __init__(self, tags: Iterable[str]) -> None:
        self.windows = 0
        self.skipped = 0
        self.is_simulated = False  # whether a window had simulated devices
        self.last_spread: dict[str, Spread] = {}  # distributions of the last window that has any
        self.curves = {tag: Curve() for tag in tags}
        self._metrics = [tag for tag in self.curves if tag != LOSS and not tag.startswith("spread/")]
        parts = [(tag, *tag.split("/")[1:]) for tag in self.curves if tag.startswith("spread/")]
        self._spreads = [(self.curves[tag], name, field) for tag, name, field in parts]
        self._attempt = 0

    def read(self, folder: Path) -> None:
        """Read the windows of a run.

        Raises:
            OSError: a file cannot be read.
        """
        found = JsonLines([path for path in segments(folder, "windows") if path.is_file()], CurveLine)
        for line in found:
            # A correction has the counts of late reports; a window without an iteration has no values of iterations.
            if not (line.correction or line.iteration_last < line.iteration_first):
                self._add(line)
        self.skipped = found.skipped

    def _add(self, line: CurveLine) -> None:
        self.windows += 1
        self.is_simulated |= line.simulated
        x = float(line.iteration if line.iteration is not None else line.iteration_last)
        if line.attempt != self._attempt:  # a restart repeats iterations: the curve begins again
            self._attempt = line.attempt
            for curve in self.curves.values():
                curve.add(x, math.nan)
        values = line.values
        for tag in self._metrics:
            self.curves[tag].add(x, values.get(tag, math.nan))
        if LOSS in self.curves:
            self.curves[LOSS].add(x, math.nan if line.loss is None else line.loss)
        self.last_spread = line.spread or self.last_spread
        for curve, name, field in self._spreads:
            spread = line.spread.get(name)
            curve.add(x, math.nan if spread is None else getattr(spread, field))


def spread_tag(name: str, field: str) -> str:
    """Return the tag of a field of a distribution."""
    return f"spread/{name}/{field}"
