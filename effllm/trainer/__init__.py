"""The part in the training process: the standard library alone, and nothing that waits or fails."""
