"""Processes of the jail: spawner, zygote, init, interpreter, helpers."""
