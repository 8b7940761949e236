"""The decisions about a job, pure: windows of ranks in, totals, metrics and summaries of the job out."""
