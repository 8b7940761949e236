"""The values of one screen for scripts: a document with stable names, and the exit status."""

from __future__ import annotations

from typing import Any

import msgspec

from effllm.views.top.frame import TopFrame
from effllm.views.top.ranks import RankLine

#: Incremented when a name of the document is removed or changes its meaning; docs/top.md describes the names.
DOCUMENT_VERSION = 1
MAX_WORST, MAX_EVENTS = 16, 10
#: Exit status.
NO_PROBLEM, PROBLEM, WRONG_USE, NO_DATA = range(4)


def exit_status(frame: TopFrame) -> int:
    """Return the exit status of ``--once``."""
    if frame.place.window is None and frame.verdict is None and not frame.values:
        return NO_DATA
    return PROBLEM if frame.problems else NO_PROBLEM


def document(frame: TopFrame) -> dict[str, Any]:
    """Return the document; a value that is not measured is absent or ``null``."""
    head = frame.head
    verdict = msgspec.to_builtins(frame.verdict) if frame.verdict is not None else None
    if verdict is not None:
        verdict.pop("evidence", None)  # effllm inspect --json
    worst = frame.ranks.with_reason()
    return {
        "schema_version": DOCUMENT_VERSION,
        "run": {
            "run_id": head.name,
            "user": head.user,
            "status": head.status,
            "is_over": head.is_over,
            "simulated": head.simulated,
            "attempt": head.attempt,
            "iteration": head.iteration,
            "total_iterations": head.total_iterations,
            "elapsed_s": head.elapsed_s,
            "remaining_s": head.remaining_s,
            "unchanged_s": head.age_s,
        },
        "window": {"window": frame.place.window, "end_time_s": frame.place.time_s, "loss": frame.loss},
        "verdict": verdict,
        "problems": [one._asdict() for one in frame.problems],
        "values": dict(frame.values),
        "doubtful": list(frame.doubtful),
        "coverage": msgspec.to_builtins(frame.coverage),
        "ranks": {
            "count": frame.ranks.count,
            "with_reason": len(worst),
            "all_have_values": frame.ranks.is_whole,
            "worst": [_rank(line) for line in worst[:MAX_WORST]],
        },
        "events": [msgspec.to_builtins(event) for event in frame.events[:MAX_EVENTS]],
        "notes": list(frame.notes),
    }


def _rank(line: RankLine) -> dict[str, Any]:
    found = line._asdict()
    del found["place"], found["size"]
    return found
