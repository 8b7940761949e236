"""What the environment states: the settings of a run, and the place of this process in its job."""
