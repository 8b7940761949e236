"""The commands of the command line, a file for each, and their parts; ``app`` declares their options."""
