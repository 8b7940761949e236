"""Splits an iteration into computation, exposed communication and idle time. No I/O.

The training process runs this module for profiled iterations, so it uses only the standard library.  All times are
whole nanoseconds, so sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Interval = tuple[int, int]

#: Kinds of communication: the process group if the profiler reports a group, else the operation.
KINDS = (
    "dp", "tp", "pp", "cp", "ep",
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv", "broadcast", "other",
)  # fmt: skip

#: Part of a group name -> kind; the first match counts. The parts are from Megatron's descriptions of groups, and from
#: names of mesh dimensions.
_GROUPS = (
    ("expert_data", "dp"), ("expert_tensor", "tp"), ("tensor_model", "tp"), ("pipeline", "pp"), ("context", "cp"),
    ("embedding", "pp"), ("expert", "ep"), ("data_parallel", "dp"), ("mesh_dp", "dp"), ("mesh_tp", "tp"),
    ("mesh_pp", "pp"), ("mesh_cp", "cp"), ("mesh_ep", "ep"),
)  # fmt: skip

#: Part of an operation name without underscores -> kind. NCCL writes ``AllReduce``, gloo writes ``all_reduce``.
_OPERATIONS = (
    ("allreduce", "all_reduce"), ("reducescatter", "reduce_scatter"), ("allgather", "all_gather"),
    ("alltoall", "all_to_all"), ("sendrecv", "send_recv"), ("send", "send_recv"), ("recv", "send_recv"),
    ("broadcast", "broadcast"),
)  # fmt: skip

#: Parts of names of kernels that move data between devices. The kernels are from NCCL, RCCL, NVSHMEM, DeepEP,
#: Transformer Engine, PyTorch's symmetric memory, and the all-reduce of inference engines.  A kernel that computes and
#: also communicates is classified by its name.
_DEVICE_COMMUNICATION = (
    "nccl", "rccl", "msccl", "nvshmem", "deep_ep", "userbuffers", "multimem_", "shot_all_reduce", "cross_device_reduce",
)  # fmt: skip

_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")

#: Host operators that may wait or only call other operators: the called operators do the work.
_NOT_COMPUTING = ("autograd::", "torch::", "torch.", "c10d", "_c10d", "record_param_comms", "symm_mem::")


class Split(NamedTuple):
    """One iteration: ``duration_ns == exposed_ns + computing_ns + idle_ns``; exposed is a part of communication."""

    duration_ns: int
    communication_ns: int  # time with communication
    exposed_ns: int  # time with communication and without computation
    computing_ns: int  # time with computation
    idle_ns: int  # time without communication and computation
    kinds: dict[str, tuple[int, int]]  # kind -> communication and exposed communication; kinds may overlap


def split_iteration(
    start_ns: int, end_ns: int, computing: Iterable[Interval], communicating: Iterable[tuple[str, int, int]]
) -> Split:
    """Return the split of the iteration ``[start_ns, end_ns]``; intervals are clipped to the iteration.

    The intervals are in any order, from any number of streams; those of communication have a kind of `KINDS`.

    >>> split_iteration(0, 100, [(0, 40), (30, 60)], [("dp", 50, 80)])
    Split(duration_ns=100, communication_ns=30, exposed_ns=20, computing_ns=60, idle_ns=20, kinds={'dp': (30, 20)})
    """
    computed = union(clipped(computing, start_ns, end_ns))
    by_kind: dict[str, list[Interval]] = {}
    for kind, begin, end in communicating:
        by_kind.setdefault(kind, []).append((begin, end))
    merged = {kind: union(clipped(intervals, start_ns, end_ns)) for kind, intervals in by_kind.items()}
    communicated = union(interval for intervals in merged.values() for interval in intervals)
    communication_ns, computing_ns = total_ns(communicated), total_ns(computed)
    exposed_ns = communication_ns - overlap_ns(communicated, computed)
    duration_ns = max(end_ns - start_ns, 0)
    return Split(
        duration_ns=duration_ns,
        communication_ns=communication_ns,
        exposed_ns=exposed_ns,
        computing_ns=computing_ns,
        idle_ns=duration_ns - computing_ns - exposed_ns,
        kinds={
            kind: (total_ns(merged[kind]), total_ns(merged[kind]) - overlap_ns(merged[kind], computed))
            for kind in KINDS
            if merged.get(kind)
        },
    )


def clipped(intervals: Iterable[Interval], start_ns: int, end_ns: int) -> Iterable[Interval]:
    for begin, end in intervals:
        begin, end = max(begin, start_ns), min(end, end_ns)
        if begin < end:
            yield begin, end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order.

    >>> union([(5, 7), (0, 3), (2, 4)])
    [(0, 4), (5, 7)]
    """
    merged: list[Interval] = []
    begin = end = 0
    for next_begin, next_end in sorted(intervals):
        if merged and next_begin <= end:
            if next_end > end:
                end = next_end
                merged[-1] = (begin, end)
        else:
            begin, end = next_begin, next_end
            merged.append((begin, end))
    return merged


def total_ns(merged: Sequence[Interval]) -> int:
    """Return the sum of the lengths of intervals that do not overlap."""
    return sum(end - begin for begin, end in merged)


def overlap_ns(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """Return the length of the intersection of two unions."""
    shared_ns, i, j = 0, 0, 0
    while i < len(first) and j < len(second):
        shared_ns += max(min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]), 0)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared_ns


def device_kind(name: str) -> str:
    """Return the kind of a device's record: one of `KINDS`, or "" for computation and copies."""
    lowered = name.lower()
    return _kind_of_operation(lowered) if any(part in lowered for part in _DEVICE_COMMUNICATION) else ""


def host_kind(name: str) -> str | None:
    """Return the kind of a host's record: one of `KINDS`, "" for computation, ``None`` for any other record.

    Python functions, annotations, and operators that only call other operators have no kind, because some of them wait.
    """
    if name.startswith(_BACKENDS):
        return _kind_of_operation(name.lower())
    return "" if "::" in name and not name.startswith(_NOT_COMPUTING) else None


def group_kind(description: str) -> str | None:
    """Return the kind of a process group from its description, or ``None`` if no kind matches."""
    lowered = description.lower()
    return next((kind for part, kind in _GROUPS if part in lowered), None)


def _kind_of_operation(lowered: str) -> str:
    plain = lowered.replace("_", "")
    return next((kind for part, kind in _OPERATIONS if part in plain), "other")
