"""What a rank states of itself, from its training process to its agent; standard library alone.

These records travel as JSON through shared memory, which is not trusted. `from_document` ignores unknown names, and
gives a field that is missing or has another type its default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

_MAX_WHOLE = 2**63  # what the wire can carry


@dataclass(frozen=True)
class DeclaredParameters:
    """Parameters of the whole model, or (``is_share``) of what this rank alone contributes."""

    total: int | None = None
    trainable: int | None = None
    active: int | None = None
    is_share: bool = False


@dataclass(frozen=True)
class RankFacts:
    """What a rank states of itself; ``None``, 0 or empty is not known."""

    config: Mapping[str, Any] = field(default_factory=dict)  # fields of `Config`
    place: Mapping[str, Any] = field(default_factory=dict)  # fields of `Place`
    host: str = ""
    trainer_pid: int = 0
    job: str = ""
    endpoint: str = ""  # of the aggregator
    secured: bool = False  # with keys from the user's secret
    run_folder: str = ""
    address_file: str = ""  # that rank 0 has published its address in
    listen_descriptor: int = -1  # of the aggregator's socket, at rank 0 ...
    stdout_descriptor: int = -1  # ... and of the job's stdout
    # The rank's devices.
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    hip_visible_devices: str | None = None
    rocr_visible_devices: str | None = None
    cuda_uuid: str = ""  # of torch's current device ...
    cuda_pci_bus_id: str = ""  # ... by either name
    gpus: tuple[int, ...] = ()  # those of a process that infers, by their places in CUDA_VISIBLE_DEVICES
    baseline_ns: tuple[int, ...] = ()  # start and end of the idle time before the first iteration
    recorder_pair_s: float | None = None  # that a start and an end of an iteration take
    # What the training script and the hooks have declared.
    parameters: DeclaredParameters = DeclaredParameters()
    run: Mapping[str, Any] = field(default_factory=dict)  # facts of the run, for run.json
    first_iteration: int = 0  # iterations that earlier runs of the job have done
    is_numbered: bool = False  # whether that is known, and not guessed
    total_iterations: int | None = None
    flops_per_token: float | None = None
    hardware_flops_per_token: float | None = None
    peer_group: str = ""
    replica: str = ""
    serves_requests: bool = False
    warnings: tuple[str, ...] = ()  # lines for the user, each once


@dataclass(frozen=True)
class FoundAddress:
    """What the search for the aggregator's address came to: an endpoint and its job, or why there is none."""

    endpoint: str = ""
    job: str = ""
    failed: str = ""  # on this rank
    refused: str = ""  # by rank 0


T = TypeVar("T")


def to_document(record: Any) -> dict[str, Any]:
    """Return a record of dataclasses as what JSON can carry."""
    return {name: to_document(value) if is_dataclass(value) else value for name, value in vars(record).items()}


def from_document(kind: type[T], document: Mapping[str, Any]) -> T:
    """Return a record of a kind; a field that is missing, or has another type, has its default."""
    found = {}
    for one in fields(kind):  # type: ignore[arg-type] # which kinds are dataclasses, mypy cannot express
        value = document.get(one.name)
        if value is not None and (read := _READERS[str(one.type).removesuffix(" | None")](value)) is not None:
            found[one.name] = read
    return kind(**found)


def _bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _int(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < _MAX_WHOLE else None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, float) or _int(value) is not None else None


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _dict(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _floats(value: Any) -> dict[str, float] | None:
    known = _dict(value)
    return None if known is None or None in map(_float, known.values()) else known


def _parameters(value: Any) -> DeclaredParameters | None:
    return None if _dict(value) is None else from_document(DeclaredParameters, value)


def _tuple_of(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...] | None]:
    def read_all(value: Any) -> tuple[Any, ...] | None:
        return None if not isinstance(value, list) or None in map(read, value) else tuple(value)

    return read_all


#: By the annotation of a field: returns a value of this type, or ``None`` for one of another.
_READERS: dict[str, Callable[[Any], Any]] = {
    "bool": _bool,
    "int": _int,
    "float": _float,
    "str": _str,
    "tuple[int, ...]": _tuple_of(_int),
    "tuple[str, ...]": _tuple_of(_str),
    "Mapping[str, Any]": _dict,
    "Mapping[str, float]": _floats,
    "DeclaredParameters": _parameters,
}
