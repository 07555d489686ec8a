"""Requests to model servers over HTTP: client, stream parsing, error mapping, and the base class of backends."""
