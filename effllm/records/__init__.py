"""Records that processes exchange, or that are stored on disk."""
