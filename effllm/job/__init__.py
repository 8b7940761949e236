"""The process at rank 0: windows of ranks in, totals, metrics and summaries of the job out."""
