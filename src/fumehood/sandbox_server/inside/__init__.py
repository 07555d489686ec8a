"""The code that runs inside the jail. It imports nothing else of fumehood."""
