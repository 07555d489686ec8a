"""Further packages for sandboxes: asked for, resolved, installed, stored, attached; imports nothing itself."""
