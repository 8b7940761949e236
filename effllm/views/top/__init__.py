"""The live view of a job on one terminal screen: pure functions from values and keys to lines of text."""
