"""What the gateway and the client tell of themselves through OpenTelemetry; imports nothing."""
