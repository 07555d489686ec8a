"""What is kept, and how; imports `interfaces` and `protocol`."""
