"""Facts that the training script declares, converted for JSON and the wire; no call raises."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from effllm.records.facts import DeclaredParameters, RankFacts
from effllm.records.ring import MAX_VALUE_NAMES
from effllm.trainer.counts import MAX_TOTAL, counts_of

#: Maximum letters in one name of values, and in all names together, because the memory of the facts has 64 kB.
MAX_NAME_LETTERS, MAX_NAMES_LETTERS = 100, 5000
#: Maximum number of facts of the run, letters in a fact's name, and bytes of all these facts as JSON.  The rest of the
#: 500 facts of a message and of the 64 kB is for facts from effllm itself.
MAX_FACTS, MAX_FACT_NAME_LETTERS, MAX_FACTS_BYTES = 450, 255, 40_000


class Declared:
    """The facts of this rank, declared by the training script and the hooks, or set by the session.

    ``changed`` is called after each declaration, and sends the facts to the agent.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self.facts = RankFacts()
        self.on_devices_change: Callable[[], None] = lambda: None  #: called after a change of `parameter_devices`
        self.num_windows = 0  #: ended windows, counted if torch has CUDA: the devices are shown once in a window
        self.parameter_devices: tuple[int, ...] = ()  #: the GPUs of the parameters that an optimizer of torch updates

    @property
    def has_parameters(self) -> bool:
        return self.facts.parameters.total is not None

    def set(self, **facts: Any) -> None:
        """Replace facts, also by ``None``; the next call of `declare` sends the facts to the agent."""
        self.facts = replace(self.facts, **facts)

    def declare(self, **facts: Any) -> None:
        """Replace facts and send them to the agent; a value of ``None`` changes nothing."""
        self.set(**{name: value for name, value in facts.items() if value is not None})
        self._changed()

    def declare_run_facts(self, facts: Any) -> None:
        """Add facts of the run; new values replace old values.  Facts above the limits are left out, with a warning."""
        run = dict(self.facts.run)
        num_bytes, left_out = len(json.dumps(run)), 0
        for given, value in _given_pairs(facts):
            name, fact = text(given), plain_value(value)
            more_bytes = len(json.dumps({name: fact})) - (len(json.dumps({name: run[name]})) if name in run else 0)
            has_room = num_bytes + more_bytes <= MAX_FACTS_BYTES and (name in run or len(run) < MAX_FACTS)
            if has_room and len(name) <= MAX_FACT_NAME_LETTERS:
                run[name] = fact
                num_bytes += more_bytes
            else:
                left_out += 1
        self.declare(run=run)
        if left_out:
            self.warn_once(
                f"facts: {left_out:,} left out of run.json: at most {MAX_FACTS} facts with {MAX_FACTS_BYTES:,} "
                f"bytes and names of {MAX_FACT_NAME_LETTERS} characters are stored"
            )
        elif not isinstance(facts, Mapping):
            self.warn_once(f"facts: an object of type {type(facts).__name__} is no dictionary")

    def warn_once(self, line: str) -> None:
        """Add a warning, unless there is one with the same first word."""
        if line.split()[0] not in {warning.split()[0] for warning in self.facts.warnings}:
            self.declare(warnings=(*self.facts.warnings, line))

    def declare_parameters(self, total: Any) -> None:
        """Replace the number of parameters of the whole model."""
        self.declare(parameters=replace(self.facts.parameters, total=positive_count(total), is_share=False))

    def declare_share(self, share: Mapping[str, Any]) -> None:
        """Replace this rank's parameter counts; the model's counts are the sums over all ranks."""
        pairs = _given_pairs(share)
        given = {text(kind): 0 if counts_of(number) == [0] else positive_count(number) for kind, number in pairs}
        self.declare(parameters=DeclaredParameters(**{kind: given.get(kind) for kind in _SHARE_KINDS}, is_share=True))

    def declare_first_iteration(self, first_iteration: Any, is_numbered: bool | None, *, keeps_earlier: bool) -> None:
        """Set the number of iterations completed by earlier attempts of the job; it is known or assumed.

        With ``is_numbered=None`` a number above 0 is known.  With ``keeps_earlier``, 0 keeps an earlier declaration.
        """
        first = positive_count(first_iteration)
        is_known = (True if first else None) if is_numbered is None else positive_count(is_numbered) is not None
        self.declare(first_iteration=first or (None if keeps_earlier else 0), is_numbered=is_known)

    def value_index(self, name: Any) -> int:
        """Return the index of a name of values, or -1 if there are too many names; a new name is added and sent."""
        names, shown = self.facts.value_names, text(name)[:MAX_NAME_LETTERS]
        if shown in names:
            return names.index(shown)
        if len(names) >= MAX_VALUE_NAMES or sum(map(len, names)) + len(shown) > MAX_NAMES_LETTERS:
            self.warn_once(
                f"instruments: the run folder has no values of {shown} and later names: at most {MAX_VALUE_NAMES} "
                f"names with {MAX_NAMES_LETTERS:,} characters are stored"
            )
            return -1
        self.declare(value_names=(*names, shown))
        return len(names)

    def set_parameter_devices(self, devices: Iterable[Any]) -> None:
        """Set the devices of the parameters that optimizers update; an optimizer may be on the host."""
        gpus = tuple(sorted({device.index or 0 for device in devices if device.type == "cuda"}))
        if gpus != self.parameter_devices:
            self.parameter_devices = gpus
            self.on_devices_change()

    def forget_training(self) -> None:
        """Reset the facts that are only valid for an earlier training in this process."""
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
        """Reset the facts of an inference process before it trains."""
        self.set(run={name: value for name, value in self.facts.run.items() if name != "framework"}, gpus=())


def _given_pairs(facts: Any) -> list[tuple[Any, Any]]:
    try:
        return list(facts.items())
    except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
        return []


_SHARE_KINDS = ("total", "trainable", "active")  # counts of a share, as in `DeclaredParameters`


def positive_count(value: Any) -> int | None:
    """Return a value as a count above 0, or ``None`` if it is invalid."""
    try:
        number = int(value)
    except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
        return None
    return number if 0 < number < MAX_TOTAL else None


def positive_number(value: Any) -> float | None:
    """Return a value as a number above 0 and up to 1e30, as in messages, or ``None`` if it is invalid."""
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
        return None
    return number if 0 < number <= 1e30 else None


def plain_value(value: Any) -> Any:
    """Return a fact unchanged if JSON and the wire have its type, else as text."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)  # messages have integers of 64 bits
    return [text(item) for item in value] if isinstance(value, (list, tuple)) else text(value)


def text(value: Any) -> str:
    """Return a value as text that can be encoded as UTF-8."""
    try:
        shown = str(value)
    except Exception:  # noqa: BLE001 - an object of the caller's, which must not end the loop
        shown = f"<{type(value).__name__}>"
    return shown.encode("utf-8", "replace").decode()  # surrogates stand for invalid bytes of the command line
