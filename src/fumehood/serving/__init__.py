"""What the gateway and the sandbox server have in common on the network; imports nothing else of Fumehood."""
