"""The distribution of scores, such as the scores of a verifier."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from effllm.instruments._number import UserWarnings, each, number, record
from effllm.instruments._statistics import Statistics

#: Maximum number of different scores that are counted separately; further scores are counted together.
MAX_SCORES = 1000


class _ValidScores(Statistics):
    """Valid scores, and the number of each score."""

    __slots__ = ("_counts", "_uncounted")

    def __init__(self) -> None:
        super().__init__(max_recent=1)
        self._counts: dict[float, int] = {}
        self._uncounted = 0  # scores beyond MAX_SCORES different ones

    def _add_values(self, values: list[float]) -> None:
        super()._add_values(values)
        counts = self._counts
        for score in values:
            if score in counts:
                counts[score] += 1
            elif len(counts) < MAX_SCORES:
                counts[score + 0.0] = 1  # -0.0 becomes 0.0, so that both have one text
            else:
                self._uncounted += 1

    def counts(self) -> tuple[dict[float, int], int]:
        """Return the number of each score, and the number of scores beyond `MAX_SCORES` different ones."""
        return (self._counts, self._uncounted) if self.moments.count else ({}, 0)


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
        self._valid = _ValidScores()
        self._missing = self._not_finite = self._out_of_range = 0
        self._warn_once = UserWarnings()

    def update(self, scores: Iterable[Any]) -> None:
        """Count a batch of scores."""
        for given in each(scores):
            score = given if type(given) is float else number(given)
            if score is None:
                self._missing += 1
                if given is not None:
                    line = f"a score of type {type(given).__name__} is not a number in CPU memory; it counts as missing"
                    self._warn_once(line, "score")
                record("scores/missing", 1.0)
            elif self._minimum <= score <= self._maximum:
                self._valid.add(score)
                record("scores/valid", score)
            elif math.isfinite(score):
                self._out_of_range += 1
                record("scores/out_of_range", score)
            else:
                self._not_finite += 1
                record("scores/valid", score)

    def get_distribution(self) -> dict[str, Any]:
        """Return counts, the share of invalid scores, and the mean of valid scores; NaN without scores.

        ``score_counts`` has the number of each valid score by its text; ``other_scores`` counts the valid scores beyond
        the first 1,000 different scores.
        """
        scores, (counts, num_others) = self._valid.moments, self._valid.counts()
        valid = scores.count
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
            "score_counts": {str(score): count for score, count in sorted(counts.items())},
            "mean_score": scores.mean,
        }
        return {**found, "other_scores": num_others} if num_others else found
