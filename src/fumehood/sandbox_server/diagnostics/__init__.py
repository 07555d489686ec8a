"""Checks of the host for `fumehood doctor`."""
