"""Tools that the gateway runs itself; imports `interfaces` and `protocol`."""
