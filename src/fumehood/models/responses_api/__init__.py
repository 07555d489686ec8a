"""The backend for model servers that speak the Responses API."""
