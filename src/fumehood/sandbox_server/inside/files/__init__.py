"""File operations that the helpers of a sandbox perform."""
