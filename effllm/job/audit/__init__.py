"""The audit: numbers of a job are checked against each other at every window. No I/O."""
