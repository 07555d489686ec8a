"""A real Kubernetes cluster of one node on this machine, built from source and gone without a trace."""
