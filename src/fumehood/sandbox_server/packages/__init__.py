"""Installs requested packages into read-only layers that are attached to sandboxes."""
