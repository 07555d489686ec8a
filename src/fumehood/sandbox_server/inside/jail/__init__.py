"""Building the jail of one sandbox."""
