"""The rules by which the aggregator computes totals, metrics and summaries of the job from the windows of its ranks."""
