"""The HTTP server; imports `interfaces`, `protocol` and the web framework."""
