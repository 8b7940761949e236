"""The folder of a run: who may write to it, what its files hold, and what keeps them whole."""
