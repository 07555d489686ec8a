"""Loading libraries before the fork, and sharing their memory."""
