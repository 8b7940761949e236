"""Who holds the job up, who has stopped, and why."""
