"""The wire: data only, no I/O."""
