"""How long a claim takes in a real Kubernetes cluster."""
