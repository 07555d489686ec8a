"""Sending the events of a run to HTTP and WebSocket clients."""
