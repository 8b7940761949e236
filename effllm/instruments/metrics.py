"""Instruments for metrics of training and for scores: ``from effllm.instruments.metrics import TrainingLogger``."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from effllm.instruments._files import write_json
from effllm.instruments._number import UserWarnings, members_of, number, record
from effllm.instruments._statistics import Statistics
from effllm.instruments.grpo import GRPOMetricsTracker, grpo_tracker
from effllm.instruments.tracker import MetricTracker

__all__ = ["GRPOMetricsTracker", "MetricTracker", "ScoreDistributionTracker", "TrainingLogger", "grpo_tracker"]
#: Maximum number of different scores that are counted separately; further scores are counted together.
MAX_SCORES = 1000


class TrainingLogger:
    """Metrics and scores of an experiment, with JSON files.

    Args:
        log_dir: folder of the files; made when the first file is written.
        experiment_name: first part of the name of each file.
        min_score: smallest valid score.
        max_score: largest valid score.
    """

    def __init__(
        self, log_dir: str | Path, experiment_name: str, min_score: float = 0.0, max_score: float = 1.0
    ) -> None:
        self._folder = Path(log_dir)
        self._name = _file_part(experiment_name, "experiment_name")
        self.metrics = MetricTracker()
        self.scores = ScoreDistributionTracker(min_score, max_score)
        self._has_scores = False
        self._start_s = time.monotonic()

    def log_step(self, step: int, metrics: Mapping[str, Any], scores: Iterable[Any] | None = None) -> None:
        """Add the metrics of a step and its scores."""
        self.metrics.update_batch(metrics, step)
        if scores is not None:
            self._has_scores = True
            self.scores.update(scores)

    def save_checkpoint_metrics(self, checkpoint_name: str) -> Path:
        """Write the statistics so far to ``EXPERIMENT_CHECKPOINT.json``; return its path.

        The calling thread computes the statistics, about 1.5 ms for each metric, and writes the file.

        Raises:
            OSError: the file cannot be written.
            ValueError: the name cannot be part of a file's name.
        """
        name = f"{self._name}_{_file_part(checkpoint_name, 'checkpoint_name')}.json"
        return write_json(self._folder / name, {"checkpoint": checkpoint_name, **self._statistics()})

    def export_all(self) -> Path:
        """Write the statistics and the newest values of each metric to ``EXPERIMENT_metrics.json``; return its path.

        The calling thread writes up to 10,000 values of each metric, which takes about 14 ms for each metric: call it
        after the training.

        Raises:
            OSError: the file cannot be written.
        """
        raw = {name: self.metrics.get_recent(name) for name in self.metrics.names}
        return write_json(self._folder / f"{self._name}_metrics.json", {**self._statistics(), "raw_metrics": raw})

    def _statistics(self) -> dict[str, Any]:
        return {
            "experiment_name": self._name,
            "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "duration_s": time.monotonic() - self._start_s,
            "last_step": self.metrics.last_step,
            "metric_summaries": {name: self.metrics.get_summary(name) for name in self.metrics.names},
            "score_distribution": self.scores.get_distribution() if self._has_scores else None,
        }


def _file_part(name: str, argument: str) -> str:
    """Return the name; `ValueError` for a name that cannot be part of a file's name, or could leave the folder."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"{argument}={name!r} must be a name without '/'")
    return name


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
        self._valid = Statistics(max_recent=1)
        self._count_by_score: dict[float, int] = {}  # number of each valid score
        self._num_missing = self._num_not_finite = self._num_out_of_range = 0
        self._warn_once = UserWarnings()

    def update(self, scores: Iterable[Any]) -> None:
        """Count a batch of scores."""
        for given in members_of(scores):
            score = given if type(given) is float else number(given)
            if score is None:
                self._num_missing += 1
                if given is not None:
                    line = f"a score of type {type(given).__name__} is not a number in CPU memory; it counts as missing"
                    self._warn_once(line, "score")
                record("scores/missing", 1.0)
            elif self._minimum <= score <= self._maximum:
                self._valid.add(score)
                if score in self._count_by_score or len(self._count_by_score) < MAX_SCORES:
                    # -0.0 becomes 0.0, so that both have one text.
                    self._count_by_score[score + 0.0] = self._count_by_score.get(score, 0) + 1
                record("scores/valid", score)
            elif math.isfinite(score):
                self._num_out_of_range += 1
                record("scores/out_of_range", score)
            else:
                self._num_not_finite += 1
                record("scores/valid", score)

    def get_distribution(self) -> dict[str, Any]:
        """Return counts, the share of invalid scores, and the mean of valid scores; NaN without scores.

        ``score_counts`` has the number of each valid score by its text; ``other_scores`` counts the valid scores beyond
        the first 1,000 different scores.
        """
        scores = self._valid.moments
        valid = scores.count
        invalid = self._num_missing + self._num_not_finite + self._num_out_of_range
        total = valid + invalid
        distribution = {
            "total": total,
            "valid_count": valid,
            "invalid_count": invalid,
            "invalid_rate": invalid / total if total else math.nan,
            "missing_count": self._num_missing,
            "not_finite_count": self._num_not_finite,
            "out_of_range_count": self._num_out_of_range,
            "score_counts": {str(score): count for score, count in sorted(self._count_by_score.items())},
            "mean_score": scores.mean,
        }
        num_others = valid - sum(self._count_by_score.values())
        return {**distribution, "other_scores": num_others} if num_others else distribution
