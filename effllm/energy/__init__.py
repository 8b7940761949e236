"""Joules of windows and their errors, from sensors that tick, smooth and wrap."""
