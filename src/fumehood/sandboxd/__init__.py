"""Isolated execution of model-written Python; imports the sandbox protocol and `serving`."""
