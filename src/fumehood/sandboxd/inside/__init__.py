"""Everything that runs inside the jail: zygote, init, runner; imports only the standard library."""
