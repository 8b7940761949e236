"""The messages between agents and the aggregator, which are encoded as arrays: fields may only be appended."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from effllm.records.energy import Amount
from effllm.records.rank import (
    MAX_DEVICES,
    Count,
    Device,
    Event,
    Fact,
    Number,
    ParameterCount,
    Position,
    RankReport,
    Sentence,
    Word,
)

MAX_ROWS = 256  # rows in one frame: about 110 kB of plain ones


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """An agent introduces its rank; sent again whenever a fact changes or the connection is new."""

    job: Word
    agent: Word
    rank: Count
    local_rank: Count
    world_size: Count
    host: Word
    role: Word
    devices: Annotated[tuple[Device, ...], Meta(max_length=MAX_DEVICES)]
    parameters: ParameterCount
    log_interval: Count
    trainer_pid: Count = 0
    offset: Position = 0  # iteration number shown = ordinal + offset
    total_iterations: Count | None = None
    flops_per_token: Amount | None = None
    facts: Annotated[dict[Word, Fact], Meta(max_length=500)] = {}
    version: Word = ""
    hardware_flops_per_token: Amount | None = None
    peer_group: Word = ""  # ranks of one role and group do equal work: those of a pipeline stage
    replica: Word = ""  # ranks of one replica wait for each other inside of an iteration: it is the model's
    is_numbered: bool = False  # the loop or a hook has given the number of the first iteration
    time_s: Number | None = None  # when it was sent, by the clock that its rows are stamped with
    start_time_s: Number | None = None  # when its first row begins, by the same


class Reports(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Windows of one rank, oldest first."""

    rows: Annotated[tuple[RankReport, ...], Meta(max_length=MAX_ROWS)]
    lost: Count = 0  # reports that the agent's full buffer dropped so far
    agent_cpu_s: Amount = 0.0
    sent_bytes: Count = 0  # so far, as are these
    recorder_cpu_s: Amount | None = None


class Heartbeat(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A heartbeat between windows, with the position of the rank."""

    agent: Word
    rank: Count
    ordinal: Count
    state: Word
    since_s: Amount
    lost: Count = 0
    sent_ns: Count = 0  # when, by the agent's clock, if the aggregator is to answer with its own; else 0
    offset_s: Number | None = None  # the aggregator's clock less the agent's, as the agent has it by now ...
    offset_error_s: Amount | None = None  # ... and a bound of the error of that
    utilization: Amount | None = None  # the newest of the rank's first device
    power_w: Amount | None = None
    process: Annotated[str, Meta(max_length=1)] = ""  # state of the trainer's process, as /proc has it: R, S, D, T, ...
    time_s: Number | None = None  # when it was sent, by the clock that rows are stamped with


class AgentEvent(Struct, frozen=True, array_like=True, tag=4):
    """An event that an agent reports."""

    agent: Word
    rank: Count
    event: Event


class Bye(Struct, frozen=True, array_like=True, tag=5):
    """The rank is over; every report it could send has been acknowledged or given up."""

    agent: Word
    rank: Count
    status: Word  # completed, failed, interrupted, killed
    last_ordinal: Count
    lost: Count = 0
    agent_cpu_s: Amount = 0.0
    sent_bytes: Count = 0
    recorder_cpu_s: Amount | None = None
    end_time_s: Number | None = None  # when its last row ends, by the clock that rows are stamped with


class Welcome(Struct, frozen=True, array_like=True, tag=6):
    """The aggregator's answer to HELLO: the attempt is its to assign."""

    attempt: int
    run_folder: str = ""
    again: bool = False  # something was dropped: send HELLO again, and what is not acknowledged
    report_every_s: Amount = 0.0  # to be left between two frames of reports, beside what the agent leaves itself


class Ack(Struct, frozen=True, array_like=True, tag=7):
    """Every report of this agent up to ``sequence`` is safe; with it the newest headline values."""

    sequence: int
    iteration: int = 0
    values: dict[str, float] = {}
    report: int = 0  # counts cluster reports, so that each is shown once


class Rejected(Struct, frozen=True, array_like=True, tag=8):
    """The aggregator rejects this agent, with the reason."""

    reason: str
    again: bool = False  # not here and now: the agent waits for another address
    whole_job: bool = False  # every agent of the job: rank 0 logs it, and the connection is of no use


class ByeSeen(Struct, frozen=True, array_like=True, tag=9):
    """The aggregator has the rank's BYE: its agent may go."""

    rank: int


class Clock(Struct, frozen=True, array_like=True, tag=10):
    """The aggregator's answer to a heartbeat that asks for it; effllm/job/health/clock.py has each stamp's clock."""

    sent_ns: Count  # of the heartbeat
    received_ns: Count
    answered_ns: Count


class Supersede(Struct, frozen=True, array_like=True, tag=12):
    """An aggregator of the next attempt asks the one that holds the run folder to write its summary and let go."""

    run: Word  # identifies the job, from the lock file
    job: Word  # of the one that asks


class Inspect(Struct, frozen=True, array_like=True, tag=11):
    """The aggregator asks for the stacks of an agent's trainer; the answer is a `Stack`."""

    reason: str


#: Of the text of a `Stack`, in letters: with what MessagePack adds it fits into a frame.
MAX_STACK = 64 * 1024


class Stack(Struct, frozen=True, array_like=True, tag=13):
    """The state of a stalled trainer and the stacks of its threads, or why there are none."""

    agent: Word
    rank: Count
    ordinal: Count
    text: Annotated[str, Meta(max_length=MAX_STACK)]
    top: Sentence = ""  # the position of its main thread, in a few words


FromAgent = Hello | Reports | Heartbeat | AgentEvent | Bye | Supersede | Stack
FromAggregator = Welcome | Ack | Rejected | ByeSeen | Clock | Inspect
