"""What a training script declares, made into what JSON and the wire can carry; never raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from effllm.records.facts import DeclaredParameters, RankFacts


class Declared:
    """The facts of this rank: those that the training script and the hooks declare, and those of its session.

    Args:
        changed: called after each declaration, so that the agent gets it.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self.facts = RankFacts()

    @property
    def has_parameters(self) -> bool:
        """Whether it is known how many parameters the model has."""
        return self.facts.parameters.total is not None

    def set(self, **facts: Any) -> None:
        """Replace facts; the agent gets them with the next that are declared."""
        self.facts = replace(self.facts, **facts)

    def learn(self, **facts: Any) -> None:
        """Replace facts; ``None`` changes nothing."""
        self.set(**{name: value for name, value in facts.items() if value is not None})
        self._changed()

    def learn_run(self, facts: Mapping[Any, Any]) -> None:
        """Add facts of the run, the new over the old."""
        self.learn(run={**self.facts.run, **{text(name): plain(value) for name, value in facts.items()}})

    def learn_parameters(self, total: Any) -> None:
        """Replace the count of the whole model's parameters."""
        self.learn(parameters=replace(self.facts.parameters, total=count(total), is_share=False))

    def learn_share(self, share: Mapping[str, Any]) -> None:
        """Replace what this rank contributes to the model: the sum over all ranks is the model."""
        counts = {kind: 0 if share.get(kind) == 0 else count(share.get(kind)) for kind in _SHARES}
        self.learn(parameters=DeclaredParameters(**counts, is_share=True))

    def learn_first(self, first_iteration: Any, is_numbered: bool | None, *, keeps_earlier: bool) -> None:
        """Add how many iterations earlier runs of the job have done.

        Args:
            first_iteration: so many.
            is_numbered: whether it is known, and not guessed; ``None``: known where it is above 0.
            keeps_earlier: whether 0 leaves what was declared before.
        """
        first = count(first_iteration)
        is_known = (True if first else None) if is_numbered is None else bool(is_numbered)
        self.learn(first_iteration=first or (None if keeps_earlier else 0), is_numbered=is_known)

    def forget_training(self) -> None:
        """Remove what an earlier training in this process has declared of itself alone."""
        self.set(
            total_iterations=None,
            flops_per_token=None,
            hardware_flops_per_token=None,
            first_iteration=0,
            is_numbered=False,
            evaluation_in_iterations=False,
            iterations_not_measured=0,
        )

    def forget_requests(self) -> None:
        """Remove what a process that infers has declared, before it trains."""
        self.set(run={name: value for name, value in self.facts.run.items() if name != "framework"}, gpus=())


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
