"""Where the hosts of the ranks were while they trained: lines of code, with their numbers of samples."""

from __future__ import annotations

from msgspec import Struct

from effllm.records.rank import Count, Sentence, Word

COMPUTE = "compute"  # kind of the samples in functions of torch that give the device its work
WORKER = "worker"  # kind of the samples of DataLoader workers that fetch
MAX_LINES = 64  # of one recording
MAX_STACKS = 250  # in the message of a recording
STACKS_FILE = "stacks.jsonl"  # in the run folder; older recordings are in stacks.jsonl.1


class CodeLine(Struct, frozen=True, array_like=True):
    """A line of the user's code, and the function in which it was."""

    kind: Word  #: such as ``data`` or ``logging``, of effllm/agent/frames.toml; ``other`` for unknown functions
    line: Sentence  #: the function of the user, and its place: ``load (data.py:41)``
    function: Sentence = ""  #: the function of a library, or ``item (probably)`` for one in C; empty in ``line`` itself
    samples: Count = 0
    by_rank: dict[int, Count] = {}  # of a job; empty in the message of a rank
    long: Count = 0  #: samples in long iterations, above the number that other iterations have


class RecordedStacks(Struct, frozen=True):
    """A line of ``stacks.jsonl``: one recording of a rank."""

    schema_version: int
    time_s: float  #: unix time at which the aggregator received it
    rank: int
    attempt: int
    samples: int
    torn: int
    #: Kind and functions, outermost first, separated by ``;``, and the number of samples: the lines of flamegraph.pl.
    stacks: dict[str, int] = {}


class HostTime(Struct, frozen=True):
    """The samples of the stacks of all recorded ranks."""

    samples: int = 0
    torn: int = 0  # samples that could not be read while the stack changed
    by_rank: dict[int, int] = {}  # samples of each rank; at most 16 ranks
    by_kind: dict[str, int] = {}  # also `WORKER`, which is not in `samples`
    lines: tuple[CodeLine, ...] = ()  # those with the most samples
