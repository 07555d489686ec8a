"""Installing requested packages as read-only layers."""
