"""The loop: one run, one path; imports `interfaces`, `protocol` and the standard library."""
