"""The egress proxy: the only way from a sandbox to the network, for sandboxes with an allow-list."""
