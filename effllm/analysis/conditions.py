"""Conditions that fail a CI job: ``joules_per_token > +2%``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from effllm.analysis.comparison import MetricComparison

#: The answers about a condition, with the exit status of `effllm compare`.
TRUE, FALSE, OPEN = "true", "false", "unknown"
EXIT_STATUS = {FALSE: 0, TRUE: 1, OPEN: 3}

_CONDITION = re.compile(r"\s*([a-z][a-z0-9_]*)\s*(>|<)\s*([+-]?\d+(?:\.\d+)?)\s*%\s*")


class Condition(NamedTuple):
    """A limit for the difference of a metric, as a share of the value of side A."""

    text: str
    metric: str
    above: bool  # True: the condition is true above the limit
    limit: float


class ConditionAnswer(NamedTuple):
    """Whether a condition is true for a side."""

    condition: str
    side: str
    answer: str
    reason: str


def parse_condition(text: str) -> Condition:
    """Return the condition in a text such as ``joules_per_token > +2%``.

    Raises:
        ValueError: the text has another form.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a condition such as 'joules_per_token > +2%' or 'tokens_per_second < -1%'")
    return Condition(" ".join(text.split()), match[1], match[2] == ">", float(match[3]) / 100)


def answer(condition: Condition, side: str, rows: Sequence[MetricComparison]) -> ConditionAnswer:
    """Return whether a condition is true for the configuration of a side, from the interval of the difference.

    The condition is true if the whole interval is beyond the limit, and false if no part is beyond the limit.
    """
    row = next((row for row in rows if row.metric == condition.metric), None)
    if row is None:
        return ConditionAnswer(condition.text, side, OPEN, "the metric was not measured")
    if row.low is None or row.high is None:
        return ConditionAnswer(condition.text, side, OPEN, row.reason)
    shown = f"{100 * row.low:+.2f} to {100 * row.high:+.2f} %"
    beyond = [edge > condition.limit if condition.above else edge < condition.limit for edge in (row.low, row.high)]
    if all(beyond):
        return ConditionAnswer(condition.text, side, TRUE, f"the difference is {shown}")
    if not any(beyond):
        return ConditionAnswer(condition.text, side, FALSE, f"the difference is {shown}")
    return ConditionAnswer(condition.text, side, OPEN, f"the difference is {shown}, which includes the limit")


def exit_status(answers: Sequence[ConditionAnswer]) -> int:
    """Return 1 if any condition is true, else 3 if any is unknown, else 0."""
    found = {one.answer for one in answers}
    return EXIT_STATUS[next((one for one in (TRUE, OPEN) if one in found), FALSE)]
