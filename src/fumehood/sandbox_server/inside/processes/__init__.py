"""The processes of the jail: spawner, zygote, init, interpreter, helpers."""
