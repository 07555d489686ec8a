"""Isolated execution of model-written Python."""
