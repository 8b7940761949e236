"""The facts of a rank, from its training process to its agent. This module uses only the standard library.

The facts are JSON in shared memory, and shared memory is not trusted. `from_document` ignores unknown names. A field
that is missing or has another type gets its default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from effllm.config.place import Place
from effllm.config.settings import Config

#: A fact of a run whose training has imported a library of progress bars.
PROGRESS_BARS = "progress_bars"

Fact = str | int | float | bool | list[str] | None
_MAX_WHOLE = 2**63  # the wire format has no larger integers


@dataclass(frozen=True)
class DeclaredParameters:
    """Parameter counts of the whole model, or (``is_share``) of this rank's share."""

    total: int | None = None
    trainable: int | None = None
    active: int | None = None
    is_share: bool = False


@dataclass(frozen=True)
class RankFacts:
    """The facts of a rank; ``None``, 0 or empty means unknown."""

    config: Config = field(default_factory=Config)
    place: Place | None = None
    host: str = ""
    trainer_pid: int = 0
    job: str = ""
    endpoint: str = ""  # of the aggregator
    secured: bool = False  # whether connections use keys derived from the user's secret
    run_folder: str = ""
    address_file: str = ""  # the file in which rank 0 has published its address
    listen_descriptor: int = -1  # descriptor of the aggregator's socket, on rank 0
    stdout_descriptor: int = -1  # descriptor of the job's stdout, on rank 0
    # The rank's devices.
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    hip_visible_devices: str | None = None
    rocr_visible_devices: str | None = None
    cuda_index: int | None = None  # the GPU that the process uses, in torch; None while this is not known
    cuda_uuid: str = ""  # UUID of this GPU
    cuda_pci_bus_id: str = ""  # PCI bus id of this GPU
    gpus: tuple[int, ...] = ()  # GPUs of a process that uses several, as positions in CUDA_VISIBLE_DEVICES
    visible_gpus: int = 0  # number of GPUs that torch sees; 0 if this is not known
    unclear_gpu: str = ""  # the reason why it is not known which of several GPUs the process uses
    baseline_ns: tuple[int, ...] = ()  # start and end of the idle time before the first iteration
    thread_id: int = 0  # of the training loop, as `threading.get_ident`; 0 while it is not known
    recorder_pair_s: float | None = None  # time of the two calls at the start and the end of an iteration
    # Declared by the training script and the hooks.
    parameters: DeclaredParameters = DeclaredParameters()
    run: Mapping[str, Fact] = field(default_factory=dict)  # facts of the run from the caller, only for run.json
    style: str = ""  # ``Step`` if the console calls an iteration a step
    evaluation_in_iterations: bool = False  # an iteration lasts from one step to the next and may include evaluations
    iterations_not_measured: int = 0  # number of iterations that ended before the metrics started
    first_iteration: int = 0  # number of iterations completed by earlier attempts of the job
    is_numbered: bool = False  # whether first_iteration is known and not assumed
    total_iterations: int | None = None
    flops_per_token: float | None = None
    hardware_flops_per_token: float | None = None
    max_positions: int | None = None  # largest possible number of positions of a micro-batch, with padding
    peer_group: str = ""
    replica: str = ""
    serves_requests: bool = False
    value_names: tuple[str, ...] = ()  # names of the values of instruments; a record of the ring has the index
    warnings: tuple[str, ...] = ()  # lines for the user; each line becomes one event


@dataclass(frozen=True)
class FoundAddress:
    """The result of the search for the aggregator's address: an endpoint and its job, or a reason."""

    endpoint: str = ""
    job: str = ""
    failed: str = ""  # reason of a failure on this rank
    refused: str = ""  # reason of a failure on rank 0


T = TypeVar("T")


def to_document(record: Any) -> dict[str, Any]:
    """Return a dataclass, and the dataclasses in it, as plain values for JSON."""
    return {name: to_document(value) if is_dataclass(value) else value for name, value in vars(record).items()}


def from_document(kind: type[T], document: Mapping[str, Any]) -> T:
    """Return a dataclass from its document; a field that is missing or has another type gets its default."""
    values = {}
    for member in fields(kind):  # type: ignore[arg-type] # mypy has no type for dataclasses
        value = document.get(member.name)
        if value is not None and (read := _READERS[str(member.type).removesuffix(" | None")](value)) is not None:
            values[member.name] = read
    return kind(**values)


# A value of an untrusted document, or ``None`` for a value of another type.


def bool_or_none(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def int_or_none(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < _MAX_WHOLE else None


def float_or_none(value: Any) -> float | None:
    return float(value) if isinstance(value, float) or int_or_none(value) is not None else None


def text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def object_or_none(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _floats_or_none(value: Any) -> dict[str, float] | None:
    numbers = object_or_none(value)
    return None if numbers is None or None in map(float_or_none, numbers.values()) else numbers


def _record_of(kind: type[T]) -> Callable[[Any], T | None]:
    return lambda value: None if object_or_none(value) is None else from_document(kind, value)


def _tuple_of(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...] | None]:
    def read_all(value: Any) -> tuple[Any, ...] | None:
        return None if not isinstance(value, list) or None in map(read, value) else tuple(value)

    return read_all


_strs = _tuple_of(text_or_none)


def _facts_or_none(value: Any) -> dict[str, Fact] | None:
    facts = object_or_none(value)
    return None if facts is None else {name: fact for name, fact in facts.items() if _is_fact(fact)}


def _is_fact(value: Any) -> bool:
    is_single = value is None or isinstance(value, (bool, float, str))
    return is_single or int_or_none(value) is not None or _strs(value) is not None


#: Annotation of a field -> function that returns a value of this type, or ``None`` for a value of another type.
_READERS: dict[str, Callable[[Any], Any]] = {
    "bool": bool_or_none,
    "int": int_or_none,
    "float": float_or_none,
    "str": text_or_none,
    "tuple[int, ...]": _tuple_of(int_or_none),
    "tuple[str, ...]": _strs,
    "Mapping[str, Fact]": _facts_or_none,
    "Mapping[str, float]": _floats_or_none,
    "Config": _record_of(Config),
    "Place": _record_of(Place),
    "DeclaredParameters": _record_of(DeclaredParameters),
}
