"""Estimates of ``effllm fit`` against tensors that were really allocated: ``python -m benchmarks.memory``."""
