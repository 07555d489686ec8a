"""`fumehood exec`: run code once, here or on a sandbox server."""
