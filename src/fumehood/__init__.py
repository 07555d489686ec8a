"""Fumehood, the open, self-hosted code interpreter."""

__version__ = "0.1.0"
