"""The commands of the command line: each command has a file, and ``app`` declares all options."""
