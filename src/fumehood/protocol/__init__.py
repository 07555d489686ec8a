"""Wire types and their encoding: data only, no I/O."""
