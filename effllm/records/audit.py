"""The audit of a run in summary.json: figures that were compared with each other."""

from __future__ import annotations

from msgspec import Struct


class ComparedFigure(Struct, frozen=True):
    """A framework's own figure that differs from the figure from the counts of all ranks, over the same windows."""

    name: str  # a name of FIGURES, with its unit
    framework: float
    own: float  # from tokens without padding, over iteration time
    factor: float  # framework / own
    windows: int  # number of compared windows


class Audit(Struct, frozen=True, omit_defaults=True):
    """The result of all checks of the numbers of a run against each other."""

    figures: tuple[ComparedFigure, ...] = ()
    doubts: tuple[str, ...] = ()  # failed checks of own figures: counts of tokens, MFU
    windows: int = 0  # number of windows whose counts were checked
