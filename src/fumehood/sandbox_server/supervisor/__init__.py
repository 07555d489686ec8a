"""Zygotes, sandboxes and executions of one host."""
