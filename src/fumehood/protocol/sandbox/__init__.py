"""Wire types of the sandbox protocol."""
