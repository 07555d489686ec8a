"""The service of named sandboxes and its HTTP API."""
