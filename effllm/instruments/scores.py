"""The distribution of scores, such as the scores of a verifier."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from effllm.instruments._active_run import record
from effllm.instruments._number import each, number
from effllm.instruments._statistics import Statistics

#: Maximum number of different scores that are counted separately; further scores are counted together.
MAX_SCORES = 1000


class ScoreDistributionTracker:
    """Counts scores, and scores that are not valid.

    A score is not valid if it is ``None``, not a finite number, or outside of the range.

    Args:
        minimum: smallest valid score.
        maximum: largest valid score.
    """

    def __init__(self, minimum: float = 0.0, maximum: float = 1.0) -> None:
        if not minimum < maximum:
            raise ValueError(f"minimum={minimum} must be below maximum={maximum}")
        self._minimum, self._maximum = minimum, maximum
        self._statistics = Statistics(max_recent=1)
        self._counts: dict[float, int] = {}
        self._uncounted = 0  # valid scores beyond MAX_SCORES different ones
        self._missing = self._not_finite = self._out_of_range = 0
        self._has_warned = False

    def update(self, scores: Iterable[Any]) -> None:
        """Count a batch of scores."""
        for given in each(scores):
            score = number(given)
            if score is None:
                self._missing += 1
                self._warn_of(given)
                record("scores/missing", 1.0)
            elif not math.isfinite(score):
                self._not_finite += 1
                record("scores/valid", score)
            elif not self._minimum <= score <= self._maximum:
                self._out_of_range += 1
                record("scores/out_of_range", score)
            else:
                self._add(score + 0.0)  # -0.0 becomes 0.0, so that both have one text

    def _warn_of(self, given: Any) -> None:
        if given is not None and not self._has_warned:
            self._has_warned = True
            line = f"a score of type {type(given).__name__} is not a number in CPU memory; it counts as missing"
            warnings.warn(line, stacklevel=3)

    def _add(self, score: float) -> None:
        self._statistics.add(score)
        record("scores/valid", score)
        if score in self._counts or len(self._counts) < MAX_SCORES:
            self._counts[score] = self._counts.get(score, 0) + 1
        else:
            self._uncounted += 1

    def get_distribution(self) -> dict[str, Any]:
        """Return counts, the share of invalid scores, and the mean of valid scores; NaN without scores.

        ``score_counts`` has the number of each valid score by its text; ``other_scores`` counts the valid scores beyond
        the first 1,000 different scores.
        """
        valid = self._statistics.count
        invalid = self._missing + self._not_finite + self._out_of_range
        total = valid + invalid
        found = {
            "total": total,
            "valid_count": valid,
            "invalid_count": invalid,
            "invalid_rate": invalid / total if total else math.nan,
            "missing_count": self._missing,
            "not_finite_count": self._not_finite,
            "out_of_range_count": self._out_of_range,
            "score_counts": {str(score): count for score, count in sorted(self._counts.items())},
            "mean_score": self._statistics.mean,
        }
        return {**found, "other_scores": self._uncounted} if self._uncounted else found
