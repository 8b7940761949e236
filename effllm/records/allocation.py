"""The GPUs of one host that a scheduler has allocated to the job."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from effllm.records.rank import MAX_DEVICES, Count, Sentence, Word

Words = Annotated[tuple[Word, ...], Meta(max_length=MAX_DEVICES)]


class Allocation(Struct, frozen=True, array_like=True):
    """The allocated GPUs of one host, and which of them no process uses."""

    source: Word  # the statement of the allocation, such as SLURM_JOB_GPUS
    count: Count  # number of allocated GPUs
    gpus: Words = ()  # keys of these GPUs; empty if they cannot be identified
    labels: Words = ()  # a short name of each of `gpus`, such as its number
    free: Words = ()  # keys of those of `gpus` that no process uses at present
    why: Sentence = ""  # the reason if the GPUs cannot be identified
    nodes: Count = 0  # number of nodes in the allocation, 0 if unknown
    node: Word = ""  # the scheduler's name of this host; empty if unknown
