"""Instruments for metrics of training: ``from effllm.instruments.metrics import TrainingLogger``."""

from effllm.instruments.grpo import GRPOMetricsTracker, grpo_tracker
from effllm.instruments.logger import TrainingLogger
from effllm.instruments.scores import ScoreDistributionTracker
from effllm.instruments.tracker import MetricTracker

__all__ = ["GRPOMetricsTracker", "MetricTracker", "ScoreDistributionTracker", "TrainingLogger", "grpo_tracker"]
