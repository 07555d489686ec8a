"""Server tool calls of every vendor as one pair of parts, and as what OpenTelemetry records; imports nothing."""
