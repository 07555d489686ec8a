"""Backend for model servers that speak Chat Completions."""
