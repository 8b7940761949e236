"""The facts of a rank, from its training process to its agent. This module uses only the standard library.

The facts are JSON in shared memory, and shared memory is not trusted: the agent checks all types (agent/trainer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

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


def to_document(record: Any) -> dict[str, Any]:
    """Return a dataclass, and the dataclasses in it, as plain values for JSON."""
    return {name: to_document(value) if is_dataclass(value) else value for name, value in vars(record).items()}


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
