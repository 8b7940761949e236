"""The messages between agents and the aggregator, encoded as arrays."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from effllm.config.place import MAX_NODE_GPUS
from effllm.records.energy import Amount
from effllm.records.facts import Fact
from effllm.records.host_lines import MAX_LINES, MAX_STACKS, CodeLine
from effllm.records.identity import Submission
from effllm.records.rank import (
    MAX_DEVICES,
    Count,
    Device,
    Event,
    Number,
    Ordinal,
    ParameterCount,
    Position,
    RankReport,
    ReportCount,
    Sentence,
    Word,
)

MAX_ROWS = 256  # maximal number of reports in one frame: about 110 kB without details


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """The message with which an agent registers its rank; sent on every new connection and when a fact changes."""

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
    hardware_flops_per_token: Amount | None = None
    peer_group: Word = ""  # ranks of one role and group do equal work, such as the ranks of a pipeline stage
    replica: Word = ""  # replica of the model: its ranks wait for each other inside an iteration
    is_numbered: bool = False  # whether the number of the first iteration is known and not assumed
    time_s: Number | None = None  # unix time of sending, by the clock that stamps reports
    start_time_s: Number | None = None  # start of the first report, by the same clock
    style: Word = ""  # this and the next two fields are copies from `RankFacts`; only rank 0 sends these fields
    evaluation_in_iterations: bool = False
    iterations_not_measured: Count = 0
    submission: Submission | None = None  # only from rank 0
    # GPUs of the host that a scheduler states as allocated, and the variable; 0 without a statement or without a GPU.
    stated_gpus: Annotated[int, Meta(ge=0, le=MAX_NODE_GPUS)] = 0
    gpus_source: Word = ""
    shares_gpu: bool = False  # whether the rank sees only one GPU, or MPS shares its GPU: other ranks may use it, too


class Reports(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Reports of one rank, oldest first."""

    rows: Annotated[tuple[RankReport, ...], Meta(max_length=MAX_ROWS)]
    lost: ReportCount = 0  # number of reports that the agent's full buffer has dropped so far
    agent_cpu_s: Amount = 0.0
    sent_bytes: Count = 0  # total so far, like the CPU times
    recorder_cpu_s: Amount | None = None
    core_wait_s: Amount | None = None  # time in which the training thread could run and had no CPU core, so far


class Heartbeat(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A heartbeat between windows, with the position of the rank."""

    agent: Word
    rank: Count
    ordinal: Ordinal
    state: Word
    since_s: Amount
    lost: ReportCount = 0
    utilization: Amount | None = None  # newest reading of the rank's first device
    power_w: Amount | None = None
    process: Annotated[str, Meta(max_length=1)] = ""  # state of the trainer's process in /proc: R, S, D, T, ...
    time_s: Number | None = None  # unix time of sending, by the clock that stamps reports


class AgentEvent(Struct, frozen=True, array_like=True, tag=4):
    """An event from an agent."""

    agent: Word
    rank: Count
    event: Event


class Bye(Struct, frozen=True, array_like=True, tag=5):
    """The last message of an agent: the rank has ended, and each of its reports was acknowledged or dropped."""

    agent: Word
    rank: Count
    status: Word  # completed, failed, interrupted, killed; ended: the exit status is not visible
    last_ordinal: Ordinal
    lost: ReportCount = 0
    agent_cpu_s: Amount = 0.0
    sent_bytes: Count = 0
    recorder_cpu_s: Amount | None = None
    end_time_s: Number | None = None  # end of the last report, by the clock that stamps reports
    core_wait_s: Amount | None = None


class Welcome(Struct, frozen=True, array_like=True, tag=6):
    """The aggregator's answer to HELLO, with the number of the attempt."""

    attempt: int
    run_folder: str = ""
    again: bool = False  # whether a frame was dropped: then HELLO and all unacknowledged reports are sent again
    report_every_s: Amount = 0.0  # minimum period of frames of reports, not a pause in addition


class Ack(Struct, frozen=True, array_like=True, tag=7):
    """Acknowledges every report of this agent up to ``sequence``; contains the newest headline values."""

    sequence: int
    iteration: int = 0
    values: dict[str, float] = {}
    report: int = 0  # number of the cluster report: the trainer shows each report once


class Rejected(Struct, frozen=True, array_like=True, tag=8):
    """The aggregator rejects this agent; the message has the reason."""

    reason: str
    again: bool = False  # whether the rejection is temporary: then the agent waits for another address
    whole_job: bool = False  # whether all agents are rejected: then rank 0 logs the reason, and agents disconnect


class ByeSeen(Struct, frozen=True, array_like=True, tag=9):
    """Acknowledges the BYE of a rank: the agent may exit."""

    rank: int


class Supersede(Struct, frozen=True, array_like=True, tag=12):
    """A request of the next attempt's aggregator to write the summary and to release the run folder."""

    restart_id: Word  # shared by all attempts of the job, from the lock file
    job: Word  # job id of the sender


class Inspect(Struct, frozen=True, array_like=True, tag=11):
    """A request for the stacks of an agent's trainer; the answer is a `Stack`."""

    reason: str


#: Limit of the text of a `Stack` in characters: a text of this length fits into a frame of MessagePack.
MAX_STACK = 64 * 1024


class Stack(Struct, frozen=True, array_like=True, tag=13):
    """The state of a stalled trainer and the stacks of its threads, or the reason for missing stacks."""

    agent: Word
    rank: Count
    ordinal: Ordinal
    text: Annotated[str, Meta(max_length=MAX_STACK)]
    top: Sentence = ""  # short form of the position of the main thread


class HostSamples(Struct, frozen=True, array_like=True, tag=14):
    """The lines of code in which a recording of a trainer's stacks has found its host, or why it failed."""

    agent: Word
    rank: Count
    samples: Count = 0
    torn: Count = 0  # samples that could not be read while the stack changed
    lines: Annotated[tuple[CodeLine, ...], Meta(max_length=MAX_LINES)] = ()
    failed: Sentence = ""
    stacks: Annotated[dict[Sentence, Count], Meta(max_length=MAX_STACKS)] = {}  # as in `RecordedStacks`
    is_worker: bool = False  # whether they are of a DataLoader worker of the trainer


class RecordStacks(Struct, frozen=True, array_like=True, tag=15):
    """A request for a recording of the trainer's stacks; the answer is `HostSamples`."""


FromAgent = Hello | Reports | Heartbeat | AgentEvent | Bye | Supersede | Stack | HostSamples
FromAggregator = Welcome | Ack | Rejected | ByeSeen | Inspect | RecordStacks
