"""A small Kubernetes for tests: an API server, a stand-in for the controller of agent-sandbox, and pods."""
