"""The owner of the iterations of this process: the only system that counts iterations.

A Trainer calls accelerate, and accelerate calls an optimizer; each of the three has a hook and detects the same step.
The system nearest to the user is the owner.  A nearer system that claims the iterations later becomes the owner.
"""

from __future__ import annotations

#: Levels of systems, the nearest to the user first. The last level is generation in a process without training.
EXPLICIT, FRAMEWORK, CORE, ACCELERATE, OPTIMIZER, GENERATION = range(6)

_NO_LEVEL = 99

_level = _NO_LEVEL
_name = ""


def claim(level: int, name: str) -> bool:
    """Make a system the owner, unless another one of the same or a nearer level is; return whether it is the owner."""
    global _level, _name
    if level < _level:
        _level, _name = level, name
    return (level, name) == (_level, _name)


def holds(level: int, name: str) -> bool:
    """Whether this system is the owner."""
    return level == _level and name == _name


def holder() -> str:
    """Return the name of the owner; empty if there is no owner."""
    return _name


def is_explicit() -> bool:
    """Whether the owner is a loop or program that itself calls effllm."""
    return _level == EXPLICIT


def release(level: int, name: str) -> None:
    """Remove this owner: the next training in this process may have another owner."""
    global _level, _name
    if holds(level, name):
        _level, _name = _NO_LEVEL, ""
