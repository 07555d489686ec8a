"""What the gateway and the sandbox server have in common as HTTP servers; imports nothing else of Fumehood."""
