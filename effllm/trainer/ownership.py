"""The owner of this process's iterations: of several that see the same step, one counts; standard library alone.

A Trainer steps through accelerate, which steps an optimizer, and each of them has a hook. The nearest to the user is
the owner; a nearer one that comes later takes over.
"""

from __future__ import annotations

#: From the nearest to the user to the farthest. The last is no training: a generation in a process without one.
EXPLICIT, FRAMEWORK, CORE, ACCELERATE, OPTIMIZER, GENERATION = range(6)

_NO_LEVEL = 99

_level = _NO_LEVEL
_name = ""


def claim(level: int, name: str) -> bool:
    """Take the count, unless a nearer system, or another as near, has it; its owner may claim it again.

    Args:
        level: one of this module's.
        name: of the system that claims, such as ``transformers``.
    """
    global _level, _name
    if level < _level:
        _level, _name = level, name
    return (level, name) == (_level, _name)


def holds(level: int, name: str) -> bool:
    """Whether this system is the owner."""
    return level == _level and name == _name


def holder() -> str:
    """Return the name of the owner, or an empty string."""
    return _name


def is_explicit() -> bool:
    """Whether a loop counts that calls us itself."""
    return _level == EXPLICIT


def release(level: int, name: str) -> None:
    """Give the count up, for the next training in this process."""
    global _level, _name
    if holds(level, name):
        _level, _name = _NO_LEVEL, ""
