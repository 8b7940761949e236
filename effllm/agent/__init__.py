"""The agent, a process beside each rank: it reads the rank's ring, samples its devices and cuts windows."""
