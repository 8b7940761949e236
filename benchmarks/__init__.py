"""Benchmarks: the cost of effllm, as a ratio to a lower bound or to another tool, measured in the same run."""
