"""Memory: what a model needs, as intervals; in a running job, when memory runs out, and whether memory leaks."""
