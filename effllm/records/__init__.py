"""The records that cross a process or a disk."""
