"""Rendering of conversations into request bodies, as far as all model servers share it."""
