"""Scripted models, tools and sandboxes, and stores in memory."""
