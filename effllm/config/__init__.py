"""The settings of a run, and the place of this process in its job, from environment variables."""
