"""How the processes of a job find, know and hear each other."""
