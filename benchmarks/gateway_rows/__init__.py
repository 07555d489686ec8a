"""The rows of the gateway benchmark, by subject."""
