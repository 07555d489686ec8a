"""HTTP connections to model servers: requests, streams, errors, retries."""
