"""What clients upload, and what of it their requests refer to."""
