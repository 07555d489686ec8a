"""File operations inside the jail."""
