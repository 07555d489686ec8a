"""The wire: data only, no I/O; imports msgspec and the standard library."""
