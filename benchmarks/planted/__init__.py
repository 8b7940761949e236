"""Jobs with a planted cause of lost device time, for tests of the verdict; the verdict's code is not used here."""
