"""The run folder: written by the aggregator, read by commands."""
