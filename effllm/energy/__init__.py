"""Joules of windows from sensors that tick, smooth and wrap, with what may be wrong with them."""
