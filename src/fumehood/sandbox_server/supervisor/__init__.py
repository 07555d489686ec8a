"""The supervisor of one host: zygotes, sandboxes, executions, files."""
