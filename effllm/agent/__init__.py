"""The process beside each rank: reads its ring, samples its device, cuts windows."""
