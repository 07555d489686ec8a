"""What writes: clients of model servers, and stand-ins; imports `interfaces` and `protocol`."""
