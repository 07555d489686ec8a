"""What clients upload, and what becomes of it; its modules import `interfaces`, `protocol` and `serving`."""
