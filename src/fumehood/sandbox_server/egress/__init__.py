"""Egress proxy for sandboxes with an allow-list."""
