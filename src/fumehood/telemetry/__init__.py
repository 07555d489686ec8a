"""What the gateway tells of itself through OpenTelemetry; imports nothing."""
