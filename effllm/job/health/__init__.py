"""Ranks that hold the job up, stalls, and their causes."""
