"""Rendering conversations for model servers."""
