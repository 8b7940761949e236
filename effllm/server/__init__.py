"""The aggregator's process: its loop, admission, acknowledgement, and outputs."""
