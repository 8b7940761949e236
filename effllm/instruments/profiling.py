"""Instruments for memory and time: ``from effllm.instruments.profiling import ComprehensiveProfiler``."""

from effllm.instruments.memory import GPUMemoryProfiler
from effllm.instruments.profiler import ComprehensiveProfiler
from effllm.instruments.throughput import ThroughputTracker
from effllm.instruments.timer import TrainingTimer
from effllm.memory.trend import MemoryTrend

__all__ = ["ComprehensiveProfiler", "GPUMemoryProfiler", "MemoryTrend", "ThroughputTracker", "TrainingTimer"]
