"""Who counts the iterations of this process: of several that see the same step, one is heard; standard library alone.

A Trainer steps through accelerate, which steps an optimizer, and each of them has a hook.  The nearest to the
person wins, and whoever comes later and stands nearer takes over.
"""

from __future__ import annotations

#: From the nearest to the person to the farthest.
#: The last is no training: whoever generates while nobody trains.
EXPLICIT, FRAMEWORK, CORE, ACCELERATE, OPTIMIZER, GENERATION = range(6)

_NOBODY = 99

_level = _NOBODY
_name = ""


def claim(level: int, name: str) -> bool:
    """Take the count, unless somebody nearer, or another as near, has it; whoever has it may claim it again.

    Args:
        level: one of this module's.
        name: of the system that claims, such as ``transformers``.
    """
    global _level, _name
    if level < _level:
        _level, _name = level, name
    return (level, name) == (_level, _name)


def holds(level: int, name: str) -> bool:
    """Whether it is they who count."""
    return level == _level and name == _name


def holder() -> str:
    """Return the name of who counts; empty where nobody does."""
    return _name


def is_explicit() -> bool:
    """Whether a loop counts that calls us itself."""
    return _level == EXPLICIT


def release(level: int, name: str) -> None:
    """Give the count up, for whoever trains next in this process."""
    global _level, _name
    if holds(level, name):
        _level, _name = _NOBODY, ""
