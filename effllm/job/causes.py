"""The causes of avoidable losses, from causes.toml: thresholds, and the next actions by framework and layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

#: Names of frameworks in run.json, without a version -> names in this table.
_FRAMEWORK_NAMES = {"megatron-core": "megatron.core", "megatron-lm": "megatron", "torch": "", "fabric": "lightning"}
#: Facts of run.json -> names of layouts in this table; the first one in use is the place of most communication.
_KINDS = {"tensor_parallel": "TP", "pipeline_parallel": "PP", "context_parallel": "CP", "expert_parallel": "EP"}
#: Below this number of iterations, the time of single iterations is no evidence.
MIN_ITERATIONS = 20


class Remedy(NamedTuple):
    """An action, and the document that describes its setting."""

    text: str  # at most 62 letters, for one line of the console
    source: str


class Cause(Struct, frozen=True, forbid_unknown_fields=True):
    """The threshold from which a loss with this cause is reported, and the next actions."""

    share: float  # of all device time
    #: By framework (as in run.json; "" for all others), or framework and layout.
    actions: dict[str, Remedy]
    min_iterations: int = MIN_ITERATIONS
    min_elapsed_s: float = 0.0
    part: str = ""  # part of the waterfall, where one part is the loss


def _read_causes() -> tuple[dict[str, Cause], dict[str, str]]:
    """Return the causes, and the documents by name."""
    table = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes())
    for cause in table["causes"].values():
        cause["actions"] = {key: (text, table["sources"][name]) for key, (text, name) in cause["actions"].items()}
    return msgspec.convert(table["causes"], dict[str, Cause]), table["sources"]


AVOIDABLE, _SOURCES = _read_causes()
#: The action for a straggler whose data is slow.
SLOW_DATA = Remedy("give the rank the storage and DataLoader workers of its peers", _SOURCES["dataloader"])


def remedy(cause: str, facts: Mapping[str, Any]) -> Remedy:
    """Return the next action for a cause, from facts of run.json: the framework, its version, the layout, the Trainer.

    Raises:
        KeyError: the cause has no action.
    """
    actions, framework = AVOIDABLE[cause].actions, str(facts.get("framework", "")).lower().split(" ")[0]
    framework, job_kinds = _FRAMEWORK_NAMES.get(framework, framework), list(_job_kinds(facts))
    model_parallel_keys = [f" {kind}" for kind in job_kinds if kind in _KINDS.values()]
    other_keys = [f" {kind}" for kind in job_kinds if kind not in _KINDS.values()]
    # The order: framework and kind, model-parallel kind, framework, other kind, "".  A framework's action for its
    # replicas of the model is wrong for the parts of one.
    keys = [*(f"{framework} {kind}" for kind in job_kinds), *model_parallel_keys, framework, *other_keys]
    return next((actions[key] for key in keys if key in actions), actions[""])


def _job_kinds(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield a job's kinds of parallelism, its layout, and its Trainer, as in the keys of actions."""
    mesh = dict(axis.partition("=")[::2] for axis in str(facts.get("device_mesh", "")).split())
    for fact, kind in _KINDS.items():
        size = facts.get(fact) or mesh.get(kind.lower(), 1)
        if str(size).isdigit() and int(str(size)) > 1:
            yield kind
    layout, stage = facts.get("parallel_layout"), facts.get("zero_stage")
    if stage:
        yield f"ZeRO-{stage}"
    yield from (str(part) for part in (layout, facts.get("trainer")) if part)
