"""The code that runs inside the jail; it is independent of the rest of fumehood."""
