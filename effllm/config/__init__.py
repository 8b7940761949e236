"""The settings of a run and the place of this process in the job, both from environment variables."""
