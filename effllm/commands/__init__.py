"""The commands of the command line: each command has a file, and commands.toml declares all options."""
