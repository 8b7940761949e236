"""Pages and tables for people, made from the results of the analysis."""
