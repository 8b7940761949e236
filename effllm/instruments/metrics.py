"""Instruments for metrics of training: ``from effllm.instruments.metrics import TrainingLogger``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from effllm.instruments._files import write_json
from effllm.instruments.grpo import GRPOMetricsTracker, grpo_tracker
from effllm.instruments.scores import ScoreDistributionTracker
from effllm.instruments.tracker import MetricTracker

__all__ = ["GRPOMetricsTracker", "MetricTracker", "ScoreDistributionTracker", "TrainingLogger", "grpo_tracker"]


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
        self._began_s = time.monotonic()

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
        return write_json(self._folder / name, {"checkpoint": checkpoint_name, **self._body()})

    def export_all(self) -> Path:
        """Write the statistics and the newest values of each metric to ``EXPERIMENT_metrics.json``; return its path.

        The calling thread writes up to 10,000 values of each metric, which takes about 14 ms for each metric: call it
        after the training.

        Raises:
            OSError: the file cannot be written.
        """
        raw = {name: self.metrics.get_recent(name) for name in self.metrics.names}
        return write_json(self._folder / f"{self._name}_metrics.json", {**self._body(), "raw_metrics": raw})

    def _body(self) -> dict[str, Any]:
        return {
            "experiment_name": self._name,
            "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "duration_s": time.monotonic() - self._began_s,
            "last_step": self.metrics.last_step,
            "metric_summaries": {name: self.metrics.get_summary(name) for name in self.metrics.names},
            "score_distribution": self.scores.get_distribution() if self._has_scores else None,
        }


def _file_part(name: str, argument: str) -> str:
    """Return a name that can be part of a file's name; a file whose name has a slash could be outside the folder."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"{argument}={name!r} must be a name without '/'")
    return name
