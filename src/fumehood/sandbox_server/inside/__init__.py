"""Code that runs inside the jail: spawner, zygote, init, runner."""
