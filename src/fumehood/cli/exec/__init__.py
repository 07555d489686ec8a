"""`fumehood exec`: runs code once, in a local sandbox or on a sandbox server."""
