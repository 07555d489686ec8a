"""Sandboxes as the gateway sees them: on a sandbox server elsewhere, or on one of its own; imports nothing."""
