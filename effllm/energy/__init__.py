"""Energy of windows with its error, from sensors that tick, average and wrap around."""
