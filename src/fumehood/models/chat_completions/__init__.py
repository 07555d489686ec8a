"""The backend for model servers that speak the Chat Completions API."""
