"""Detection of stragglers and stalls, and of their causes."""
