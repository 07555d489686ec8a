"""HTTP server code that the gateway and the sandbox server share. Import single modules of it: uvicorn loads slowly."""
