"""What a training script declares, made into what JSON and the wire can carry; never raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Declared:
    """What the training script and the hooks declare of this rank and its run.

    Args:
        changed: called after each change, so that the agent gets it.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        #: By name; `Session` adds its own, and sends all of them to the agent.
        self.values: dict[str, Any] = {"parameters": {}, "run": {}, "first_iteration": 0, "warnings": []}

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What is known of the model's parameters; another object after each declaration of them."""
        return self.values["parameters"]  # type: ignore[no-any-return]

    @property
    def has_parameters(self) -> bool:
        """Whether it is known how many parameters the model has."""
        return self.parameters.get("total") is not None

    @property
    def first_iteration(self) -> int:
        """How many iterations earlier runs of the job have done."""
        return int(self.values["first_iteration"])

    def learn(self, **facts: Any) -> None:
        """Add facts: a mapping to the one of that name, others in the place of it; ``None`` adds nothing."""
        for name, value in facts.items():
            if isinstance(value, Mapping):
                declared = {text(key): plain(one) for key, one in value.items()}
                self.values[name] = {**self.values.get(name, {}), **declared}
            elif value is not None:
                self.values[name] = value
        self._changed()

    def learn_parameters(self, share: Mapping[str, Any]) -> None:
        """Add what this rank contributes to the model: the sum over all ranks is the model."""
        counts = {kind: 0 if share.get(kind) == 0 else count(share.get(kind)) for kind in _SHARES}
        self.learn(parameters={**counts, "is_share": True})

    def learn_first(self, first_iteration: Any, is_numbered: bool | None, *, keeps_earlier: bool) -> None:
        """Add how many iterations earlier runs of the job have done.

        Args:
            first_iteration: so many.
            is_numbered: whether it is known, and not guessed; ``None``: known where it is above 0.
            keeps_earlier: whether 0 leaves what was declared before.
        """
        first = count(first_iteration)
        is_known = (True if first else None) if is_numbered is None else is_numbered
        self.learn(first_iteration=first or (None if keeps_earlier else 0), is_numbered=is_known)

    def forget_training(self) -> None:
        """Remove what an earlier training in this process has declared of itself alone."""
        self.values.update(dict.fromkeys(("total_iterations", "flops_per_token", "hardware_flops_per_token")))
        self.values.update(first_iteration=0, is_numbered=False)
        for name in ("evaluation_in_iterations", "iterations_not_measured"):
            self.values["run"].pop(name, None)

    def forget_requests(self) -> None:
        """Remove what a process that infers has declared, before it trains."""
        self.values["run"].pop("framework", None)
        self.values["gpus"] = []


_SHARES = ("total", "trainable", "active")


def count(value: Any) -> int | None:
    """Return a count above 0, or ``None`` for what is none."""
    try:
        number = int(value)
    except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
        return None
    return number if 0 < number < 2**62 else None


def positive(value: Any) -> float | None:
    """Return a finite number above 0, or ``None`` for what is none."""
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
        return None
    return number if 0 < number < float("inf") else None


def plain(value: Any) -> Any:
    """Return a fact as JSON and the wire can carry it: as it is, or as text."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)
    return [text(one) for one in value] if isinstance(value, (list, tuple)) else text(value)


def text(value: Any) -> str:
    """Return a value as text that can be encoded."""
    try:
        shown = str(value)
    except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
        shown = f"<{type(value).__name__}>"
    return shown.encode("utf-8", "replace").decode()  # bytes of the command line that are no text are surrogates
