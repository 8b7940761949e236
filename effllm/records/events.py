"""The registry of event kinds: where each is shown, and its meaning.

A kind that is not listed here is shown on the console, so that a missing entry is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Levels: where an event is shown.  Every event is counted and written to events.jsonl.
FILE = "file"  # only in events.jsonl
ONCE = "console, each text once"
ALWAYS = "console, every time"


@dataclass(frozen=True)
class Kind:
    """One kind of event."""

    level: str  # FILE, ONCE or ALWAYS
    help: str  # one sentence for the person who reads it
    is_problem: bool = False  # coloured on a terminal


KINDS: dict[str, Kind] = {
    # Ranks and agents
    "joined": Kind(FILE, "A rank's agent connected."),
    "left": Kind(FILE, "A rank ended, with its status."),
    "rank_lost": Kind(ONCE, "A rank's agent sent nothing for 15 s, or its process is gone.", is_problem=True),
    "back": Kind(ONCE, "The agent of a lost rank sends again."),
    "missing": Kind(FILE, "A window closed without the report of a rank."),
    "late": Kind(FILE, "A report came after its window had closed; totals were corrected."),
    "reports_lost": Kind(ALWAYS, "Reports of a rank will never arrive.", is_problem=True),
    "restarted": Kind(ALWAYS, "The job was started again and continues in the same run folder."),
    "agent": Kind(FILE, "Any other message of an agent about itself or its devices."),
    "warning": Kind(ONCE, "A warning from the training process.", is_problem=True),
    "disagreement": Kind(ONCE, "Ranks report different parameter counts of the whole model.", is_problem=True),
    # Connections
    "rejected": Kind(
        ONCE, "A peer was rejected; each rejection is counted, repeated ones without a line.", is_problem=True
    ),
    "garbage": Kind(ONCE, "A frame was rejected because it could not be decoded.", is_problem=True),
    "security": Kind(FILE, "How connections are protected."),
    "descriptors": Kind(ALWAYS, "The limit of open files is too low for the job.", is_problem=True),
    # The aggregator and its sinks
    "aggregator": Kind(ALWAYS, "The aggregator could not be started, or died and was replaced.", is_problem=True),
    "sink": Kind(ONCE, "A sink cannot be opened, fails, or is too slow.", is_problem=True),
    "clock": Kind(FILE, "The clock of the aggregator's host was set."),
    # Devices
    "not_measured": Kind(ONCE, "A quantity that a device cannot give, with the reason."),
    "stale": Kind(ONCE, "A read of a device does not return, or returns again.", is_problem=True),
    "xid": Kind(ALWAYS, "The driver reported an Xid error of a GPU.", is_problem=True),
    "ecc": Kind(ALWAYS, "A GPU reported uncorrected memory errors.", is_problem=True),
    "power_limit": Kind(FILE, "The power limit of a GPU was changed."),
    # Energy
    "energy_counter": Kind(ONCE, "A GPU's energy counter is not used, or used again.", is_problem=True),
    "energy_disagreement": Kind(ONCE, "A GPU's energy counter and its power disagree.", is_problem=True),
    "energy_calibration": Kind(ONCE, "A GPU contradicts the calibration in the cache, which was dropped."),
    "energy_aliasing": Kind(
        ONCE, "Iterations keep step with power sensors: the energy of single GPUs has a larger error.", is_problem=True
    ),
    "energy_doubtful": Kind(
        ONCE, "Most windows are too short for the power sensors; their energy is not shown.", is_problem=True
    ),
    # Training
    "mfu": Kind(
        ONCE, "MFU or HFU came out above 1: a wrong number of FLOPs or tokens, or a wrong peak.", is_problem=True
    ),
    "loss_not_finite": Kind(ALWAYS, "The loss is NaN or infinite; once per state.", is_problem=True),
    "loss_finite": Kind(ALWAYS, "The loss is finite again."),
    "gpus_idle": Kind(ALWAYS, "The GPUs were busy for less than 20 % of several windows.", is_problem=True),
    "gpus_busy": Kind(ALWAYS, "The GPUs were idle, and work again."),
    "no_tokens": Kind(ALWAYS, "Iterations go on, but tokens are not counted any more.", is_problem=True),
    "tokens_again": Kind(ALWAYS, "Tokens were not counted, and are again."),
    "slower": Kind(ONCE, "The job became slower, with what else changed at the time.", is_problem=True),
    "faster": Kind(FILE, "The job became faster."),
    "stalled": Kind(ALWAYS, "No rank makes progress; the position of each rank is listed.", is_problem=True),
    "resumed": Kind(ALWAYS, "The job makes progress again after a stall."),
    "stack": Kind(ONCE, "The files with the stacks of stalled ranks."),
    "straggler": Kind(ALWAYS, "A rank is slower than its peers and holds them up.", is_problem=True),
    "recovered": Kind(ALWAYS, "A straggler is as fast as its peers again."),
}


def level_of(kind: str) -> str:
    """Return the level of a kind; one that is not registered is shown."""
    known = KINDS.get(kind)
    return known.level if known is not None else ONCE


def is_problem(kind: str) -> bool:
    known = KINDS.get(kind)
    return known is not None and known.is_problem
