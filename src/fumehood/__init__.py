"""Fumehood, the open, self-hosted code interpreter; imports nothing."""

__version__ = "0.1.0"
