"""The GPUs that are allocated to a job on this host, as stated by Slurm, Kubernetes or a container.

Without a statement nothing is assumed: a rank that does not use a GPU of its host is usual on a shared host.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from effllm.records.allocation import Allocation
from effllm.records.plain_text import one_line
from effllm.records.rank import MAX_DEVICES

JOB_GPUS, STEP_GPUS, GPUS_ON_NODE = "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"
KUBERNETES, VISIBLE = "KUBERNETES_SERVICE_HOST", "NVIDIA_VISIBLE_DEVICES"
HIDDEN = "devices hidden from this job"
#: Slurm sets these for an allocation of parts of GPUs (gres/shard and gres/mps), which other jobs may use too.
SHARES = ("SLURM_SHARDS_ON_NODE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
MAX_DIGITS = 10  # of a number in a variable
MAX_NODE_LETTERS = 255
_FIRST_RESERVED_STEP = 0xFFFFFFF0  # ids of the batch script and of a shell of salloc begin here
_PCI_DRIVER, _DEV = Path("/sys/bus/pci/drivers/nvidia"), Path("/dev")


class HostGpu(NamedTuple):
    """A GPU that this process can see."""

    key: str  # UUID
    number: int | None  # N of /dev/nvidiaN
    is_sliced: bool  # whether MIG is enabled
    is_free: bool  # whether no process uses the GPU
    position: int | None = None  # in NVML's list, which has the order of the PCI bus


class Statement(NamedTuple):
    """The allocated GPUs of this host by number or by UUID, or only their count."""

    source: str
    num_gpus: int
    numbers: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()
    is_shared: bool = False  # whether only parts of these GPUs are allocated


def read_statement(environ: Mapping[str, str]) -> Statement | None:
    """Return the statement in the environment of a rank; ``None`` without a statement."""
    if environ.get("SLURM_JOB_ID", "").strip():
        return _of_slurm(environ)
    if environ.get(KUBERNETES, "").strip():
        return _of_kubernetes(environ.get(VISIBLE, ""))
    return None


def _num_nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes in the allocation of a Slurm job; 0 if unknown."""
    return _whole(environ.get("SLURM_JOB_NUM_NODES", "")) or 0


def hidden_by_system(num_visible: int, driver: Path = _PCI_DRIVER, dev: Path = _DEV) -> Statement | None:
    """Return a statement if a container or a device cgroup hides GPUs of the host from this job.

    Then the visible GPUs are allocated.  A GPU that is only broken is not hidden: its device file can be opened.

    Args:
        num_visible: number of GPUs that NVML lists.
        driver: folder with an entry for each GPU of the host.
        dev: folder of the device files.
    """
    try:
        on_host = sum(":" in entry.name for entry in driver.iterdir())
        files = [entry for entry in dev.iterdir() if entry.name.removeprefix("nvidia").isdecimal()]
    except OSError:
        return None
    if not 0 < num_visible < on_host or sum(not _is_denied(file) for file in files) != num_visible:
        return None
    return Statement(HIDDEN, num_visible)


def allocation(
    statement: Statement, gpus: Sequence[HostGpu], environ: Mapping[str, str], error: str = ""
) -> Allocation:
    """Return the allocated GPUs and the free GPUs among them.

    Args:
        statement: the statement of the allocation.
        gpus: the visible GPUs.
        environ: the environment of a rank.
        error: the reason why GPUs cannot be listed.
    """
    found, why = ([], error) if error else _identify(statement, gpus)
    found = found[:MAX_DEVICES]
    return Allocation(
        source=statement.source,
        count=statement.num_gpus,
        gpus=tuple(gpu.key for gpu in found),
        labels=tuple(gpu.key if gpu.number is None else str(gpu.number) for gpu in found),
        free=tuple(gpu.key for gpu in found if gpu.is_free),
        why=why,
        nodes=_num_nodes(environ),
        node=one_line(environ.get("SLURMD_NODENAME", "")).strip()[:MAX_NODE_LETTERS],
    )


def _of_slurm(environ: Mapping[str, str]) -> Statement | None:
    is_shared = any(environ.get(name, "").strip() for name in SHARES)
    for name in (JOB_GPUS, STEP_GPUS):
        # A step on another node than that of the batch script has inherited the numbers of the batch script's node.
        if name == JOB_GPUS and _is_step(environ) and not _has_one_node(environ):
            continue
        if numbers := _numbers(environ.get(name, "")):
            return Statement(name, len(numbers), numbers, is_shared=is_shared)
    count = _whole(environ.get(GPUS_ON_NODE, ""))
    return Statement(GPUS_ON_NODE, count, is_shared=is_shared) if count else None


def _is_step(environ: Mapping[str, str]) -> bool:
    step = _whole(environ.get("SLURM_STEP_ID", ""))
    return step is not None and step < _FIRST_RESERVED_STEP


def _has_one_node(environ: Mapping[str, str]) -> bool:
    return environ.get("SLURM_JOB_NUM_NODES", "").strip() == "1"


def _of_kubernetes(visible: str) -> Statement | None:
    """Return the statement of the device plugin; ``all``, ``none``, ``void`` and a path are no statement."""
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if entries and all(entry.startswith(("GPU-", "MIG-")) for entry in entries):
        return Statement(VISIBLE, len(entries), keys=tuple(entries))
    numbers = _numbers(visible)
    return Statement(VISIBLE, len(numbers), numbers) if numbers else None


def _whole(text: str) -> int | None:
    """Return a whole number of at most `MAX_DIGITS` digits; ``None`` for any other text."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as ``0-3,5``; empty for any other text, also for a repeated number."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        start, end = _whole(first), _whole(last if dash else first)
        if start is None or end is None or len(found) > MAX_DEVICES:
            return ()
        found.extend(range(start, min(end, start + MAX_DEVICES) + 1))
    return tuple(sorted(found)) if len(set(found)) == len(found) <= MAX_DEVICES else ()


def _identify(statement: Statement, gpus: Sequence[HostGpu]) -> tuple[list[HostGpu], str]:
    """Return the allocated GPUs, or the reason why they cannot be identified."""
    if any(gpu.is_sliced for gpu in gpus) or any(key.startswith("MIG-") for key in statement.keys):
        return [], "MIG is enabled, and the processes of slices are not read"
    if statement.is_shared:
        return [], "parts of GPUs are allocated, and other jobs may use the other parts"
    if statement.keys:
        found = [gpu for gpu in gpus if gpu.key in statement.keys]
        return (found, "") if len(found) == statement.num_gpus else ([], _lists(len(found), statement.num_gpus))
    if len(gpus) == statement.num_gpus:  # a container or a device cgroup numbers its GPUs anew
        return list(gpus), ""
    if len(gpus) < statement.num_gpus:
        return [], _lists(len(gpus), statement.num_gpus)
    # Slurm's numbers are positions in its list of GPUs, which has the order of the PCI bus or of gres.conf, and in old
    # versions the numbers of the device files (src/plugins/gres/common/gres_common.c).  So both must select the same.
    found = [gpu for gpu in gpus if gpu.number in statement.numbers]
    if len(found) == statement.num_gpus:
        if found == [gpu for gpu in gpus if gpu.position in statement.numbers]:
            return found, ""
        return [], "the numbers of the device files differ from the order of the PCI bus"
    return [], f"it is not known which {statement.num_gpus} of {len(gpus)} GPUs are allocated"


def _lists(visible: int, allocated: int) -> str:
    return f"NVML lists {visible} of {allocated} allocated GPUs"


def _is_denied(file: Path) -> bool:
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in (errno.EPERM, errno.EACCES)
    return False


def ranges(labels: Iterable[str]) -> str:
    """Return labels as text, with consecutive numbers as a range: ``4-7``."""
    runs: list[list[str]] = []
    for label in sorted(labels, key=lambda one: (not one.isdecimal(), int(one) if one.isdecimal() else 0, one)):
        is_next = runs and label.isdecimal() and runs[-1][-1].isdecimal() and int(label) == int(runs[-1][-1]) + 1
        if is_next:
            runs[-1].append(label)
        else:
            runs.append([label])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
