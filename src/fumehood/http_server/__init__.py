"""HTTP server code that the gateway and the sandbox server share."""
