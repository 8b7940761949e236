"""The audit of a run in summary.json: figures that were compared with each other."""

from __future__ import annotations

from msgspec import Struct

#: Outcomes of a comparison with a framework's own figure.
AGREES = "agrees"  # no difference beyond the tolerance
COUNTS = "other count"  # the framework counts padding, or only positions with a label
NAMED = "named cause"  # the factor is a known quantity of the job
UNEXPLAINED = "unexplained"
VARIES = "varies"  # the factor changes too much between windows for a statement
TOO_FEW = "too few windows"

#: Outcomes that are differences, so that one of the two figures is wrong.
DIFFERENCES = (NAMED, UNEXPLAINED)


class AuditedFigure(Struct, frozen=True, omit_defaults=True):
    """A framework's own figure beside the figure from the counts of all ranks, over the same windows."""

    name: str  # a name of FIGURES
    unit: str
    framework: float
    own: float  # from tokens without padding
    factor: float  # framework / own
    noise: float  # half-width of the factor's relative error: spread of the windows, at least the tolerance
    windows: int  # number of compared windows
    outcome: str
    text: str
    reasons: tuple[str, ...] = ()  # all quantities of the job that have the value of the factor


class Audit(Struct, frozen=True, omit_defaults=True):
    """The result of all checks of the numbers of a run against each other."""

    figures: tuple[AuditedFigure, ...] = ()
    doubts: tuple[str, ...] = ()  # failed checks of own figures: counts of tokens, MFU
    windows: int = 0  # number of windows whose counts were checked
