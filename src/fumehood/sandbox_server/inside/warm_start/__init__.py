"""Loads libraries before the fork and lets forks share their memory."""
