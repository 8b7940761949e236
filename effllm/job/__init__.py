"""The rules of the aggregator: computes totals, metrics and summaries of the job from the windows of its ranks."""
