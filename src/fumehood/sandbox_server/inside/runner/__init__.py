"""Runs code and shell commands and captures their output."""
