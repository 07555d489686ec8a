"""Isolated execution of model-written Python; imports only `fumehood.protocol.sandbox`."""
