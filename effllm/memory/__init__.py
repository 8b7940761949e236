"""Memory of a model before the run: its parameters, the parts in bytes as intervals, and what makes it fit."""
