"""Texts of a run, a window and numbers; sinks and the store use them, too."""
