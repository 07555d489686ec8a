"""What benchmarks share: samples and rows, references, our own server, a light client, a census."""
